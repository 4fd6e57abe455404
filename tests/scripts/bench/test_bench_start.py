"""bench_start.py: what a start of many ranks asks of the store."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.paths import SCRIPTS


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench.bench_start")


def test_a_start_asks_as_much_of_the_store_among_many_ranks(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["--ranks", "16", "320", "--json", str(tmp_path / "start.json")]) == 0
    few, many = json.loads((tmp_path / "start.json").read_text()).values()
    assert 20 < few["requests"] == many["requests"] < 50
    assert (few["subgroups"], many["subgroups"]) == (2 + 8, 40 + 8)
    assert all(figure > 0 for figures in (few, many) for figure in figures.values())
    assert "CPU of all requests" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench.main(["--ranks", "4"])
    assert "expected 8 or more" in capsys.readouterr().err
