"""bench_scale.py: steps of engines without a wire, plans of large models, and their page."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.paths import SCRIPTS

TRAINED = {"ranks": 2, "name": "native", "zero": 0, "predicted_s": 1.1, "measured_s": 1.0,
           "low_s": 0.9, "high_s": 1.5}  # fmt: skip

ONE = ["--models", "GPT-NeoX-20B"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(importlib.import_module("bench.scale_bench.figures"), "ROUNDS", 3)
    monkeypatch.setattr(importlib.import_module("bench.scale_bench.figures"), "MOST_S", 0.1)
    return importlib.import_module("bench.bench_scale")


def test_every_engine_is_measured_among_few_and_many_ranks(bench: Any, tmp_path: Path) -> None:
    assert bench.main(["host", "--ranks", "2", "8", "96", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "host.json").read_text())["rows"]
    assert {(row["engine"], row["ranks"]) for row in rows} == {
        (name, ranks) for name in bench.ENGINES for ranks in (2, 8, 96)
    }
    by_engine = {name: [row for row in rows if row["engine"] == name] for name in bench.ENGINES}
    for name, (two, few, many) in by_engine.items():
        assert 0 < few["low"] <= few["us"] <= few["high"]
        assert 0 < few["nbytes"] < few["native_nbytes"]
        if name != "ZeRO 1 and 2":  # whose buckets take other ways to their owners
            assert (many["launches"], many["messages"]) == (few["launches"], few["messages"])
        if name in ("ZeRO 3", "FSDP2", "DDP", "ZeRO 0", "ZeRO 1 and 2"):
            assert many["tensors"] == few["tensors"], "a file does not grow by the ranks' parts"
            assert two["residuals"] >= few["file"] // 2 > 0
        else:
            assert not few["residuals"] and not few["file"]


def test_the_page_shows_what_was_measured_planned_and_trained(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tmp_path / "runs", tmp_path / "out"
    asked = ["host", "--ranks", "2", "8", "--engines", "DDP", "pp", "--out", str(source)]
    assert bench.main(asked) == 0
    monkeypatch.setattr(bench.planned, "RATES", (25,))
    monkeypatch.setattr(bench.planned, "MOST_STAGES", 1)
    monkeypatch.setattr(bench.planned, "MOST_MICRO", 1)
    assert bench.main(["plans", "--gpus", "8", "64", *ONE, "--out", str(source)]) == 0
    plans = json.loads((source / "plans.json").read_text())["rows"]
    fits = [row for row in plans if "native" in row]
    assert len(fits) == 2
    for row in fits:
        assert row["planned"] <= row["auto"] <= min(row["native"], row["recommended"]) + 1e-9
        assert 0 < row["host_of_recommended"] < row["recommended"]
    bench.kept(source / "trainings.json", ("ranks", "name", "zero"), [TRAINED])
    measured = {
        "8": {"a": [10.0, 1.0, 2], "all_to_all new splits": [50.0, 5.0, 2]},
        "4096": {"a": [11.0, 1.1, 2], "all_to_all new splits": [110.0, 9.0, 2]},
    }
    (source / "messages.json").write_text(json.dumps(measured))
    results = importlib.import_module("bench.results")
    assert results.main(["--scale", str(source), "--out", str(out)]) == 0
    page = (out / "scale.md").read_text()
    assert "+10 %" in page and "Not trained: 4, 8, 16 ranks" in page
    assert "GPT-NeoX-20B: native layout" in page
    assert "all but 1 take at most 1.5 times as long among 4,096 ranks as among 8, with as" in page
    assert "| all_to_all new splits | 50 | 110 | 2.20 |" in page and "40 bytes for each" in page
    assert "256 places at 8 ranks" in " ".join(page.split())
    assert "which up to 2 ranks share" in page
    assert (out / "scale_host.png").is_file() and (out / "scale_plans.png").is_file()
    assert not [name for name in ("{us}", "{trained}", "{tables}") if name in page]


def test_what_grows_is_told_by_the_measurements(bench: Any) -> None:
    growth = importlib.import_module("bench.scale_bench.growth")
    rows = [
        {"engine": name, "ranks": ranks, "launches": launches, "operations": operations}
        for name, launches, operations in (("ZeRO 1 and 2", 9, 5), ("ZeRO 3", 12, 18))
        for ranks in (2, 8, 64)
    ]  # fmt: skip
    said = growth.grows(rows)
    assert "ZeRO 1 and 2" in said and "ZeRO 3" not in said and "another way" not in said
    rows[2]["launches"], rows[-1]["operations"] = 5, 36
    said = " ".join(growth.grows(rows).split())
    assert "in another way among 64." in said and "as here from 64 ranks on" in said
    flat = {count: {"a": [10.0, 1.0, 2 + (count == "64")]} for count in ("8", "64")}
    said = growth.growing(flat)
    assert (
        "all take" in said
        and "but for `a`, which take two hops" in said
        and "never met" not in said
    )


def test_rows_are_replaced_and_others_stay(bench: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    bench.kept(path, ("a",), [{"a": 1, "b": 1}, {"a": 2, "b": 2}])
    assert bench.kept(path, ("a",), [{"a": 1, "b": 3}]) == [{"a": 2, "b": 2}, {"a": 1, "b": 3}]


@pytest.mark.parametrize("asked", [["plans", "--gpus", "12"], ["host", "--ranks", "1"]])
def test_impossible_numbers_are_refused(bench: Any, asked: list[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(asked)


@pytest.mark.nightly
def test_trainings_are_predicted(bench: Any, tmp_path: Path) -> None:
    asked = ["trainings", "--ranks", "2", "--seconds", "5", "--out", str(tmp_path)]
    assert bench.main(asked) == 0
    rows = json.loads((tmp_path / "trainings.json").read_text())["rows"]
    assert len(rows) == len(bench.trained.TRIED)
    assert all(row["predicted_s"] > 0 and row["measured_s"] > 0 for row in rows)
