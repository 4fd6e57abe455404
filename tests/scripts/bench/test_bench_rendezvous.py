"""bench_rendezvous.py: seconds, bytes and round trips of meetings at a rendezvous."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from tests.paths import SCRIPTS


@pytest.mark.nightly
def test_rows_of_meetings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    bench = importlib.import_module("bench.bench_rendezvous")
    arguments = ["--islands", "2", "--mbytes", "20", "--repeats", "2"]
    assert bench.main([*arguments, "--json", str(tmp_path / "rows.json")]) == 0
    (row,) = json.loads((tmp_path / "rows.json").read_text()).values()
    assert all(figure > 0 for figure in row.values())
    assert row["requests"] == 6  # five pieces, and whether all are there
    with pytest.raises(SystemExit):
        bench.main(["--islands", "1"])
