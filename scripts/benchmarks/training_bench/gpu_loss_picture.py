"""Losses of native and compressed trainings, and the gap of each seed in the last fifth."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.training_bench.loss_gaps import AIM, Found
from hybridcomp.tools.compare.draw import COLOURS, style_of
from hybridcomp.tools.compare.report import Result
from hybridcomp.tools.compare.statistics import running_mean


def draw(result: Result, gaps: Mapping[str, Found], path: Path, title: str) -> bool:
    """Draw the losses by tokens, beside them the gaps; False where nothing was evaluated."""
    if not gaps:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, panel) = pyplot.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    window = max(1, len(result.aligned.axis) // 50)
    for number, run in enumerate(result.runs):
        mean = running_mean(result.aligned.losses[number], window).mean(axis=0)
        losses.plot(result.aligned.axis / 1e6, mean, label=run.label, **style_of(number))
    losses.set_xlabel("million tokens")
    losses.set_ylabel(f"training loss, mean of {window} steps")
    losses.legend(frameon=False)
    for number, (name, one) in enumerate(gaps.items()):
        _gaps(panel, name, one, COLOURS[1 + number % (len(COLOURS) - 1)])
    panel.axhline(0, color=COLOURS[0], lw=1)
    panel.axhline(AIM, color="black", lw=1, ls="--", label=f"aim: at most {AIM:g} %")
    panel.set_xlabel("step")
    panel.set_ylabel("gap on held-out text, %")
    panel.legend(frameon=False)
    for axes in (losses, panel):
        axes.grid(alpha=0.25, lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return True


def _gaps(axes: Any, name: str, one: Found, colour: str) -> None:
    """Draw the gap of each seed thinly, their mean and its interval."""
    steps = one.seeds[0].steps
    for seed in one.seeds:
        axes.plot(seed.steps, seed.curve, color=colour, lw=0.7, alpha=0.6, marker=".")
    axes.plot(steps, np.mean([seed.curve for seed in one.seeds], axis=0), color=colour, lw=2.2)
    half = "" if one.half is None else f" ± {one.half:.3f}"
    axes.axhline(one.gap, color=colour, lw=1, label=f"{name}: {one.gap:+.3f}{half} %")
    if one.half is not None:
        axes.axhspan(one.gap - one.half, one.gap + one.half, color=colour, alpha=0.15, lw=0)
