"""Tables and chapters of scripts/benchmarks/bench_training.py: what is paired, chosen and said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training_bench import cells, chapters, losses, report
from tests.scripts.benchmarks.made_rows import loss_row, record


def test_speed_ups_are_of_the_same_turn_and_held_against_the_ideal() -> None:
    assert report.ideal(4.0, 4.0) == 2.5 and report.ideal(1.0, 1.0) == 1.0
    records = [
        record(cells.REFERENCE, [5.0, 10.0, 20.0], 4e6),
        record("recommended", [2.5, 4.0, 10.0], 1e6),
        record("recommended", [5.0, 4.0], 1e6, n=1),
    ]  # fmt: skip
    native, row = report.rows_of(records)
    assert (row["low"], row["speed_up"], row["high"]) == (1.0, 2.0, 2.5)
    assert (row["pairs"], row["repetitions"], row["seconds"]) == (5, 2, 4.0)
    # 4 MB at 1 MB/s take 4 s, the compute of these turns 1 s
    assert row["r_measured"] == native["r_measured"] == 4.0 and row["compute_s"] == 1.0
    assert row["saving"] == 4.0 and row["share"] == pytest.approx(2.0 / 2.5)
    text = report.table([native, row], "dp2")
    assert "| pairs |" in text and text.splitlines()[-1].endswith("| 5 |")
    assert "2.00x (1.00 to 2.50) | 2.50: 80%" in text and "1.00x | 1.00: 100%" in text
    (uncounted,) = report.rows_of([record(cells.REFERENCE, [5.0], 0.0, ratio=None)])
    assert uncounted["saving"] is None and "share" not in uncounted
    assert "| - |" in report.table([uncounted], "dp2")


@pytest.mark.parametrize(("count", "out"), [(1, 0), (5, 0), (8, 0), (9, 1), (16, 3), (20, 5)])
def test_interval_of_a_median_leaves_out_what_chance_allows(count: int, out: int) -> None:
    """Half of the values lie below the median: how many do is binomial."""
    assert report.outside(count) == out


def test_ours_is_chosen_by_bytes_before_losses() -> None:
    rows = [
        loss_row("recommended", 100, 0.0), loss_row("3 bits, deltas 3", 50, 0.5),
        loss_row("2 bits, deltas 3", 40, 0.1), loss_row("peer qgz", 60, 1.0),
        loss_row("peer sdp4bit", 45, 0.14), loss_row("peer powersgd-4", 10, 3.0),
        loss_row("peer loco", 55, 0.2), loss_row("peer onebit-adam", 70, -3.0),
        loss_row("peer onebit-adam-exact", 200, -3.5),
    ]  # fmt: skip
    found = {duel["peer"]: duel for duel in losses.duels_of(rows)}
    assert found["qgz"]["ours"] == "3 bits, deltas 3" and found["qgz"]["winner"] == "ours"
    assert found["sdp4bit"]["winner"] == "neither" and found["loco"]["winner"] == "peer"
    assert found["powersgd-4"]["ours"] is None
    assert "all of ours send more" in losses.table(list(found.values()))
    assert "onebit-adam-exact" not in found and found["onebit-adam"]["winner"] == "peer"
    (said,) = losses.optimizers(list(found.values()))
    assert "Uncompressed it ends at -3.50 ± 0.10 %, so its compression costs +0.50 %" in said
    assert found["qgz"]["further_gap"] == pytest.approx(0.5)
    assert (found["qgz"]["seeds_ours"], found["loco"]["seeds_ours"]) == (3, 0)
    alone = losses.apart(loss_row("a", 1, 0.0, None), loss_row("b", 1, 1.0, None))
    assert (alone["winner"], alone["further_interval"]) == ("one seed", None)


def bench_rows() -> list[dict[str, Any]]:
    cells_ = [record(cells.REFERENCE, [5.0], 4e6), record("recommended", [2.0], 1e6),
              record("naive-zfp", [4.0], 2e6), record("native fp32", [4.0], 8e6),
              record("fp32 naive-zfp", [3.2], 2e6)]  # fmt: skip
    return report.rows_of([{**cell, "layout": "3d"} for cell in cells_])


def test_chapters_say_what_was_measured(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    for chapter in (chapters.speed_chapter, chapters.equal_bytes_chapter):
        with pytest.raises(FileNotFoundError, match="run scripts/benchmarks/bench_training.py"):
            chapter(source, out)
    (source / "bench_training.json").write_text(json.dumps(bench_rows()))
    speed = chapters.speed_chapter(source, out)
    assert "1 of 2 compressed cells reach it" not in speed and "of 3 compressed cells" in speed
    assert "Not measured: dp2, " in speed and "![" not in speed  # one rate: nothing to draw
    (source / "losses").mkdir()
    (source / "losses" / "equal_bytes.json").write_text(
        json.dumps(losses.duels_of([loss_row("recommended", 5, 0.0), loss_row("peer qgz", 6, 1.0)]))
    )
    assert "| qgz | 6 | +1.00 ± 0.10 | recommended | 5 |" in chapters.equal_bytes_chapter(
        source, out
    )


def test_what_was_not_measured_anew_stays_in_the_chapter(tmp_path: Path) -> None:
    """Whole tables of a layout and rate are replaced, and pictures follow."""
    pytest.importorskip("matplotlib")

    def measured(layout: str, ratio: float | None, arms: dict[str, float]) -> list[dict[str, Any]]:
        made = [record(arm, [seconds], 4e6, ratio) for arm, seconds in arms.items()]
        return report.rows_of([{**cell, "layout": layout} for cell in made])

    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    arms = {cells.REFERENCE: 5.0, "recommended": 2.0, "bound": 3.0}
    before = [
        row for layout in ("dp2", "pp2") for r in (1.0, 4.0) for row in measured(layout, r, arms)
    ]
    (source / "bench_training.json").write_text(json.dumps(before))
    assert "![tokens a second, dp2](speed_dp2.png)" in chapters.speed_chapter(source, out)
    pictures = {name: (out / f"speed_{name}.png").read_bytes() for name in ("dp2", "pp2")}
    fresh = [*measured("pp2", 4.0, {cells.REFERENCE: 5.0, "recommended": 1.0}),
             *measured("pp2", None, {cells.REFERENCE: 5.0})]  # fmt: skip
    (source / "bench_training.json").write_text(json.dumps(fresh))
    speed = chapters.speed_chapter(source, out)
    written = json.loads((out / "speed.json").read_text())
    assert [(row["layout"], row["r"], row["arm"]) for row in written] == [
        *(("dp2", r, arm) for r in (1.0, 4.0) for arm in arms),
        ("pp2", None, cells.REFERENCE),
        *(("pp2", 1.0, arm) for arm in arms),
        ("pp2", 4.0, cells.REFERENCE),
        ("pp2", 4.0, "recommended"),
    ]
    assert written[-1]["seconds"] == 1.0 and "## dp2" in speed
    assert (out / "speed_dp2.png").read_bytes() == pictures["dp2"]
    assert (out / "speed_pp2.png").read_bytes() != pictures["pp2"]
