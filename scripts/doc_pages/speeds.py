"""README's table of speeds, from docs/results/speed.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SPEEDS = Path(__file__).resolve().parents[2] / "docs" / "results" / "speed.json"
#: first cell of a row -> layout and arm of speed.json; rows that were not measured are left out
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


def measured() -> dict[tuple[str, str, float], Mapping[str, Any]]:
    """Return the rows of speed.json by layout, arm and ratio."""
    return {
        (row["layout"], row["arm"], row["r"]): row
        for row in json.loads(SPEEDS.read_text(encoding="utf-8"))
    }


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
