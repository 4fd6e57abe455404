"""The table of bench_slices.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def table(found: Mapping[str, Any]) -> str:
    """Markdown: a way of slicing in each row."""
    lines = ["| slices | tokens of each | predicted ms | measured ms | measured / predicted |"]
    lines.append("|---|---|---|---|---|")
    for name, row in found.items():
        took, thought = (1e3 * row[f"{which}_s"] for which in ("measured", "predicted"))
        lengths = row["slices"] if name == "chosen" else sorted(set(row["slices"]))
        shown = ", ".join(map(str, lengths))
        lines.append(f"| {name} | {shown} | {thought:.0f} | {took:.0f} | {took / thought:.2f} |")
    return "\n".join(lines)
