"""Plot tokens per second against the network's rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.training_bench.cells import REFERENCE

#: arms with the same colour in every picture; others use a second palette
OWN = (
    "recommended", "bound", "naive-zfp", "delta", "mzhybrid", "zhybrid", "naive-mpc",
    "native fp32", "recommended when auto", "recommended nodes", "bound nodes",
)  # fmt: skip


def draw(rows: Sequence[dict[str, Any]], layout: str, path: Path) -> bool:
    """Draw a line for each arm; an arm with fewer rates than others is in the table only.

    Draws nothing and returns False for fewer than two rates.
    """
    shaped = [
        row for row in rows
        if row["layout"] == layout and "failed" not in row and row["rate"] is not None
    ]  # fmt: skip
    # sessions differ in rate and machine speed: plot all at the reference's rates
    base = {row["r"]: row for row in shaped if row["arm"] == REFERENCE}
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in shaped:
        if row["r"] in base:
            native = base[row["r"]]
            point = (native["rate"] / 1e6, native["tokens_per_second"] * row["speed_up"])
            lines.setdefault(row["arm"], []).append(point)
    ticks = {row["rate"] / 1e6: f"{row['rate'] / 1e6:.0f}\n(r {r:g})" for r, row in base.items()}
    most = max(map(len, lines.values()), default=0)
    if most < 2:
        return False
    lines = {arm: points for arm, points in lines.items() if len(points) == most}
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8.5, 5.2), constrained_layout=True)
    colors = colors_of(list(lines))
    for arm, points in lines.items():
        points.sort()
        wide = arm == "recommended" or arm.startswith("native")
        axes.plot(
            [x for x, _ in points], [y for _, y in points],
            color=colors[arm],
            linestyle="--" if arm.startswith("peer") else "-",
            linewidth=2.4 if wide else 1.3, marker="o", markersize=3.5,
            label=arm,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
    axes.set_xlabel("link of every node, Mb/s (r: time of native bytes over time of compute)")
    axes.set_ylabel("tokens a second")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{layout}: training speed over slow links")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


def colors_of(arms: Sequence[str]) -> dict[str, Any]:
    """Return the color of every arm; colors of ``OWN`` do not depend on the other arms."""
    from matplotlib import color_sequences

    first, second = color_sequences["tab20"], color_sequences["tab20b"]
    found: dict[str, Any] = dict(zip(OWN, [*first[::2], first[1]], strict=True))
    others = [arm for arm in arms if arm not in found]
    found |= {arm: second[place * 3 % len(second)] for place, arm in enumerate(others)}
    return {**found, REFERENCE: "black"}
