"""The table of bench_slices.py."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from bench.training_bench.report import outside

HEAD = (
    "slices", "tokens of each", "predicted ms", "measured ms", "measured / predicted",
    "chosen / these", "95 % interval", "turns",
)  # fmt: skip


def table(found: Mapping[str, Any]) -> str:
    """Markdown: a way of slicing in each row."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    for name, row in found.items():
        took, thought = (1e3 * row[f"{which}_s"] for which in ("measured", "predicted"))
        lengths = row["slices"] if name == "chosen" else sorted(set(row["slices"]))
        shown, compared = ", ".join(map(str, lengths)), "- | -"
        if name != "chosen":
            middle, low, high = against(found, name)
            compared = f"{middle:.3f} | {low:.3f} - {high:.3f}"
        cells = f"{thought:.0f} | {took:.0f} | {took / thought:.2f} | {compared}"
        lines.append(f"| {name} | {shown} | {cells} | {len(row['seconds'])} |")
    return "\n".join(lines)


def against(found: Mapping[str, Any], name: str) -> tuple[float, float, float]:
    """The chosen slices' seconds over those of ``name``, turn by turn, as long as both took turns.

    Returns the median and its interval, which below six turns is all of them.
    """
    pairs = zip(found["chosen"]["seconds"], found[name]["seconds"], strict=False)
    ratios = sorted(chosen / other for chosen, other in pairs)
    low = outside(len(ratios))
    return statistics.median(ratios), ratios[low], ratios[-1 - low]
