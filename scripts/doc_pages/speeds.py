"""Make README's table of speeds from docs/results/speed.csv."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path

SPEEDS = Path(__file__).resolve().parents[2] / "docs" / "results" / "speed.csv"
#: first cell of a row -> layout and arm on the page; unmeasured rows are dropped
ROWS = {
    "ZeRO 0": ("dp2", "recommended"),
    "ZeRO 1": ("zero1", "recommended"),
    "ZeRO 2": ("zero2", "recommended"),
    "ZeRO 3, parameters gathered once": ("zero3", "recommended"),
    "FSDP2, fp32 sums": ("fsdp2", "recommended"),
    "FSDP2, native with `reduce_dtype=bf16`": ("fsdp2", "peer bf16"),
    "DDP, fp32": ("ddp", "recommended"),
    "DDP, native with torch's bf16 hook": ("ddp", "peer bf16"),
    "DDP, torch's PowerSGD hook, rank 4": ("ddp", "peer powersgd-4"),
    "two pipeline stages": ("pp2", "recommended"),
    "two tensor ranks": ("tp2", "recommended"),
}
#: communication over compute at which every row is measured
RATIOS = (1.0, 4.0)


@cache
def measured() -> Mapping[tuple[str, str, float], Mapping[str, float]]:
    """Return the figures on rate-limited links, by layout, arm and ratio.

    ``rate`` is in Mb/s, ``sent_MB`` in MB per step; native bf16 has no ``low`` and ``high``.
    """
    found = {}
    with open(SPEEDS, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            layout, arm = row.pop("layout"), row.pop("arm")
            if row["r"]:
                figures = {name: float(text) for name, text in row.items() if text}
                found[layout, arm, figures["r"]] = figures
    return found


def table() -> str:
    """Return the table: a row for each job that was measured at every ratio."""
    found = measured()
    lines = ["| job | r near 1 | r near 4 |", "|---|---|---|"]
    for words, (layout, arm) in ROWS.items():
        cells = [found[layout, arm, r] for r in RATIOS if (layout, arm, r) in found]
        if len(cells) == len(RATIOS):
            told = [f"{cell['speed_up']:.2f} (r = {cell['r_measured']:.1f})" for cell in cells]
            lines.append(f"| {words} | {' | '.join(told)} |")
    return "\n".join(lines)
