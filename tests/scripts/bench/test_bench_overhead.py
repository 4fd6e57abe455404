"""Two checkouts in turns: both answer, each with its own package, and who is slower is told."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT

pytest.importorskip("deepspeed")


@pytest.fixture
def against(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("bench.overhead.against")


def test_every_stage_has_its_cases(against: Any) -> None:
    told = [str(case) for case in against.cases([0, 3])]
    assert told[:3] == ["ZeRO-0 identity", "ZeRO-0 compressed", "ZeRO-0 small messages"]
    assert told[-2:] == ["ZeRO-3 small messages", "codecs"]


@pytest.mark.nightly
def test_a_checkout_against_itself(against: Any) -> None:
    """Turns of a step, with everything encoded in short messages."""
    row = against.compare(against.Case("small messages", 1), [ROOT, ROOT], 2, 16)
    assert row["case"] == "ZeRO-1 small messages"
    assert len(row["ratios"]) == 2 and all(0 < ratio < 1000 for ratio in row["ratios"])
    assert row["old_ms"] > 0 < row["new_ms"]


def test_a_package_from_elsewhere_is_refused(against: Any, tmp_path: Path) -> None:
    (tmp_path / "elsewhere/hybridcomp").mkdir(parents=True)
    with (
        against.checkout(str(tmp_path / "elsewhere")) as source,
        pytest.raises(RuntimeError, match="a rank ended|expected hybridcomp of"),
    ):
        against.Team(source, against.Case("codecs"), 16, tmp_path / "team")


def test_an_unknown_commit_is_told(against: Any) -> None:
    with pytest.raises(RuntimeError, match="nosuchcommit"), against.checkout("nosuchcommit"):
        pass
