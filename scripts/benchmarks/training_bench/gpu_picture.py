"""Speed on one GPU as bars, beside what the bytes would allow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.training_bench.cells import REFERENCE
from benchmarks.training_bench.gpu_cells import COMPUTE
from benchmarks.training_bench.gpu_report import ours

OURS, OTHERS, NATIVE = "#0072B2", "#E69F00", "#9A9A9A"


def draw(rows: Sequence[dict[str, Any]], size: str, path: Path) -> bool:
    """Draw a panel a layout, a bar an arm; return False where this size was not measured."""
    shown = [row for row in rows if row["size"] == size and "failed" not in row]
    layouts = list(dict.fromkeys(row["layout"] for row in shown))
    if not layouts:
        return False
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    across = min(3, len(layouts))
    down = math.ceil(len(layouts) / across)
    most = max(sum(row["layout"] == name for row in shown) for name in layouts)
    figure, grid = plt.subplots(
        down, across, figsize=(4.6 * across, down * (0.9 + 0.22 * most)), squeeze=False,
        constrained_layout=True,
    )  # fmt: skip
    for axes in grid.flat[len(layouts) :]:
        axes.axis("off")
    for axes, layout in zip(grid.flat, layouts, strict=False):
        own = [row for row in shown if row["layout"] == layout and row["arm"] != COMPUTE]
        _panel(axes, own, layout)
    figure.suptitle(f"Steps of native bf16 over steps of the arm, {size} parameters, one GPU")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def _panel(axes: Any, rows: Sequence[dict[str, Any]], layout: str) -> None:
    rows = sorted(rows, key=lambda row: row["speed_up"])
    colours = [
        NATIVE if r["arm"] == REFERENCE else OURS if ours(r["arm"]) else OTHERS for r in rows
    ]
    places = range(len(rows))
    speeds = [row["speed_up"] for row in rows]
    spread = [
        [row["speed_up"] - row["low"] for row in rows],
        [row["high"] - row["speed_up"] for row in rows],
    ]
    axes.barh(places, speeds, color=colours, xerr=spread, error_kw={"lw": 0.8, "ecolor": "#444444"})
    for place, row in zip(places, rows, strict=True):
        if "ideal" in row and row["arm"] != REFERENCE:
            axes.plot([row["ideal"]] * 2, [place - 0.4, place + 0.4], color="black", lw=1.6)
    axes.set_yticks(list(places), [row["arm"] for row in rows], fontsize=8)
    axes.axvline(1, color=NATIVE, lw=0.8)
    found = [row["r"] for row in rows if "r" in row]
    r = f", r {found[0]:.2f}" if found else ""
    axes.set_title(f"{layout}{r}  (black: what its bytes allow)", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
