"""Draw a step of each arm, with lanes for computation, codec, wire, copies and the host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.waits_bench.intervals import Stretch, within
from benchmarks.waits_bench.lanes import CODEC, COMPUTATION, COPIES, HOST, LANES, WIRE, Lanes

COLOURS = {
    COMPUTATION: "#9A9A9A", CODEC: "#0072B2", WIRE: "#E69F00", COPIES: "#CC79A7", HOST: "#009E73",
}  # fmt: skip
BLOCKED = "#D55E00"


def draw(arms: dict[str, Sequence[Lanes]], title: str, path: Path) -> None:
    """Draw rank 0's step nearest to the mean, for all arms on one time scale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(
        len(arms), 1, figsize=(12, 0.6 + 1.9 * len(arms)), sharex=True, squeeze=False,
        constrained_layout=True,
    )  # fmt: skip
    for axes, (name, ranks) in zip(grid.flat, arms.items(), strict=True):
        _panel(axes, ranks[0], name)
    grid.flat[-1].set_xlabel("ms of the step; red: the host waits for the GPU")
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def typical(steps: Sequence[Stretch]) -> Stretch:
    """Return the step whose length is nearest to the mean."""
    mean = sum(stop - start for start, stop in steps) / len(steps)
    return min(steps, key=lambda step: abs(step[1] - step[0] - mean))


def _panel(axes: Any, lanes: Lanes, name: str) -> None:
    step = typical(lanes.trace.steps)
    for place, lane in enumerate(LANES):
        _bars(axes, lanes.times[lane], step, place, COLOURS[lane])
    _bars(axes, lanes.blocked, step, LANES.index(HOST), BLOCKED)
    axes.set_yticks(range(len(LANES)), LANES, fontsize=8)
    axes.set_ylim(len(LANES) - 0.5, -0.5)
    axes.axvline((step[1] - step[0]) / 1e6, color="black", lw=0.8)
    axes.set_title(f"{name}: {(step[1] - step[0]) / 1e6:.1f} ms", fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def _bars(axes: Any, times: list[Stretch], step: Stretch, place: int, colour: str) -> None:
    bars = [((s - step[0]) / 1e6, (e - s) / 1e6) for s, e in within(times, step)]
    axes.broken_barh(bars, (place - 0.4, 0.8), color=colour)
