"""Tables of scripts/benchmarks/bench_training.py: pairing and text."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.training_bench import cells, report


def record(
    arm: str, steps: list[float], sent: float, ratio: float | None = 4.0, n: int = 0
) -> dict[str, Any]:
    """Return a repetition of an arm, in the benchmark's format."""
    return {
        "layout": "dp2", "arm": arm, "ratio": ratio, "repetition": n, "steps": steps,
        "sent": sent, "rate": 8_000_000 if ratio else None, "tokens": 100, "loss": 2.0,
        "busy": 0.0, "burst_ms": 0.25, "native_sent": 4e6,
        "native": [5.0, 10.0, 20.0][: len(steps)], "compute": [1.0, 1.0, 4.0],
    }  # fmt: skip


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
    text = report.table_of([native, row], "dp2")
    assert "| pairs |" in text and text.splitlines()[-1].endswith("| 5 |")
    assert "2.00x (1.00 to 2.50) | 2.50: 80%" in text and "1.00x | 1.00: 100%" in text
    (uncounted,) = report.rows_of([record(cells.REFERENCE, [5.0], 0.0, ratio=None)])
    assert uncounted["saving"] is None and "share" not in uncounted
    assert "| - |" in report.table_of([uncounted], "dp2")


@pytest.mark.parametrize(("count", "out"), [(1, 0), (5, 0), (8, 0), (9, 1), (16, 3), (20, 5)])
def test_interval_of_a_median_leaves_out_what_chance_allows(count: int, out: int) -> None:
    """Half of the values lie below the median: their number is binomial."""
    assert report.outside(count) == out
