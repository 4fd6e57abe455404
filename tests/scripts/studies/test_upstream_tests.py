"""``scripts/studies/upstream_tests.py`` on a folder that stands in for upstream's tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from studies import upstream_tests

TESTS = """
import os


def test_always():
    assert True


def test_only_plainly():
    assert "HYBRIDCOMP_CONFIG" not in os.environ


def test_is_armed_or_not():
    import sys
    armed = "HYBRIDCOMP_CONFIG" in os.environ
    assert ("hybridcomp" in sys.modules) == armed


def test_never():
    raise ValueError
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Create a checkout whose tests report their environment."""
    unit = tmp_path / "checkout/tests/unit"
    unit.mkdir(parents=True)
    (unit / "test_one.py").write_text(TESTS)
    return tmp_path / "checkout"


@pytest.mark.nightly
def test_what_passes_only_plainly_is_named(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    status = upstream_tests.main(
        [
            "deepspeed",
            str(checkout),
            "--files",
            "unit/test_one.py",
            "--out",
            str(out),
            "--again",
            "2",
        ]
    )
    said = capsys.readouterr().out
    assert status == 1
    assert "unit/test_one.py: 3 passed, 1 failed; armed 2 passed, 2 failed" in said
    assert "test_only_plainly: failed with hybridcomp, then passed 2 and 0 of 2 times" in said
    assert "1 pass only without hybridcomp" in said
    outcomes = json.loads((out / "deepspeed/outcomes.json").read_text())
    assert outcomes["plain"]["unit.test_one::test_never"] == "failed"


def test_the_worst_rank_counts() -> None:
    ranks = [{"a": "passed", "b": "passed", "c": "skipped"}, {"a": "passed", "b": "failed"}]
    assert upstream_tests.worst(ranks) == {"a": "passed", "b": "failed", "c": "missing"}


def test_a_checkout_without_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        upstream_tests.main(["megatron", str(tmp_path)])
    assert "expected a checkout with tests/unit_tests" in capsys.readouterr().err


@pytest.mark.parametrize(("without", "with_", "bad"), [(3, 0, 1), (4, 3, 1), (2, 2, 0), (0, 1, 0)])
def test_what_passes_less_often_armed_counts(without: int, with_: int, bad: int) -> None:
    class Flaky(upstream_tests.Run):
        runs = {False: iter([1] + [1] * without + [0] * 9), True: iter([0] + [1] * with_ + [0] * 9)}

        def outcomes(self, file: str, armed: bool, only: Sequence[str] = ()) -> dict[str, str]:
            return {
                "unit.test_one::test_now_and_then": ("failed", "passed")[next(self.runs[armed])]
            }

    run = Flaky("deepspeed", Path(), Path(), 1, 1.0)
    assert upstream_tests.compared(run, "unit/test_one.py", 4)[2] == bad
