"""What the table of ``bench_when.py`` concludes from seconds of steps."""

from __future__ import annotations

from typing import Any

import pytest

from bench import bench_when


def found(auto: list[float], compared: list[int] | None = None, **more: Any) -> dict[str, Any]:
    """Native steps of 1 s and always compressed ones of 0.5 s beside those of ``auto``."""
    seconds = {"native": [1.0] * len(auto), "always": [0.5] * len(auto), "auto": auto}
    return {"seconds": seconds, "trials_s": 2.0, "compared": compared, "parameters": 3_000_000,
            "decided": {"dp": True, "zero": False}, **more}  # fmt: skip


def test_cost_is_of_trials_and_compared_steps() -> None:
    steps = [0.5] * 3 + [1.0, 0.5, 1.0, 0.5] + [0.51] * 33
    row = bench_when.judged(found(steps, [3, 7]))
    assert row["better"] == "always" and row["compared_s"] == pytest.approx(1.0)
    assert row["cost"] == pytest.approx((2.0 + 1.0) / 500)
    assert row["kept"] == pytest.approx(0.5 / 0.51)
    assert row["run"] == pytest.approx(500 / (510 + 3))


def test_compared_steps_that_were_faster_are_no_gift() -> None:
    row = bench_when.judged(found([0.4] * 40, [3, 7]))
    assert row["compared_s"] < 0 and row["cost"] == pytest.approx(2.0 / 500)


def test_the_page_names_what_misses() -> None:
    good = {"engine": "ddp", "rate": "100mbit", **found([0.5] * 40)}
    bad = {"engine": "zero1", "rate": "none", **found([0.8] * 40)}
    rows = [{**row, **bench_when.judged(row)} for row in (good, bad)]
    text = bench_when.page(rows)
    assert "| ddp | 100mbit | 1000 | 500 | 500 | dp | 2.00 | 0.00 | 0.40% | 1.000 | 0.996 |" in text
    assert "Missed by: zero1 over loopback." in text and "of 3.0 million" in text
    assert "Both aims are met in every row." in bench_when.page(rows[:1])
