"""A comparison as a picture: loss curves above, the difference to the baseline below."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpt.runs import Comparison, Curve, Run, RunError, pair

#: distinct for colour-blind readers too (Okabe and Ito); the baseline is grey and wide, so that it
#: can be seen below a curve that covers it
COLOURS = ("#9A9A9A", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
#: what the lower panel shows at the end of the run sets its scale: the start is all noise
SETTLED = 1 / 3


def draw(
    runs: Sequence[Run], comparisons: Sequence[Comparison], path: Path, smooth: int, title: str
) -> None:
    """Write ``path`` as PNG. ``smooth``: steps of the running mean, 0 for a twentieth of the run.

    Raises RunError when matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise RunError("--png needs matplotlib: pip install 'hybridcomp[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    window = smooth or max(1, len(runs[0].steps) // 20)
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(8, 6.4), sharex=True, height_ratios=(2.2, 1), layout="constrained"
    )
    for number, (run, comparison) in enumerate(zip(runs, comparisons, strict=True)):
        colour = COLOURS[0] if number == 0 else COLOURS[1 + (number - 1) % (len(COLOURS) - 1)]
        _curve(above, run, window, colour, _legend(run, comparison, number == 0))
        if number:
            _difference(below, runs[0], run, window, colour)
    _finish(above, below, runs, window, title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def running_mean(curves: Curve, window: int) -> Curve:
    """Mean of the last ``window`` steps along the second axis, of as many as there are at first."""
    sums = np.cumsum(curves, axis=1)
    sums[:, window:] = sums[:, window:] - sums[:, :-window]
    counts = np.minimum(np.arange(1, curves.shape[1] + 1), window)
    return np.asarray(sums / counts)


def difference(baseline: Run, run: Run, window: int) -> Curve:
    """Smoothed loss over the baseline's of the same seed, in percent: (seeds, steps)."""
    own = running_mean(run.losses, window)
    other = running_mean(baseline.losses[pair(baseline, run)], window)
    return np.asarray(100 * (own / other - 1))


def _curve(axes: Any, run: Run, window: int, colour: str, label: str) -> None:
    smooth = running_mean(run.losses, window).mean(axis=0)
    width = 4.0 if colour == COLOURS[0] else 1.5
    axes.plot(run.steps, smooth, color=colour, lw=width, label=label, solid_capstyle="round")


def _difference(axes: Any, baseline: Run, run: Run, window: int, colour: str) -> None:
    curves = difference(baseline, run, window)
    axes.plot(run.steps, curves.mean(axis=0), color=colour, lw=1.5)
    if len(curves) > 1:
        axes.fill_between(
            run.steps, curves.min(axis=0), curves.max(axis=0), color=colour, alpha=0.15, lw=0
        )


def _legend(run: Run, comparison: Comparison, baseline: bool) -> str:
    gap = "" if baseline else f" ({comparison.gap:+.2f}%)"
    bits = run.bits()
    return f"{run.label}: {comparison.final_loss:.3f}{gap}" + (f"\n{bits}" if bits else "")


def _finish(above: Any, below: Any, runs: Sequence[Run], window: int, title: str) -> None:
    """Titles, axes with units, and scales that show the end of the run."""
    seeds = len(runs[0].files)
    tail = f"{window}-step mean" + (f" over {seeds} seeds" if seeds > 1 else "")
    above.set_title(title or "Training loss with and without compressed communication")
    above.set_ylabel(f"loss (nats per token)\n{tail}")
    above.legend(
        frameon=False,
        fontsize=9,
        title="final loss (difference), bytes against native",
        alignment="left",
    )
    below.axhline(0, color=COLOURS[0], lw=3)
    below.set_ylabel("difference to\nthe baseline (%)")
    bands = " (bands: range over the seeds)" if seeds > 1 else ""
    below.set_xlabel(f"optimizer step{bands}")
    start = int(len(runs[0].steps) * SETTLED)
    settled = [difference(runs[0], run, window)[:, start:] for run in runs[1:]]
    low = min(0.0, *(float(curves.min()) for curves in settled))
    high = max(0.0, *(float(curves.max()) for curves in settled))
    pad = max(0.15 * (high - low), 0.1)
    below.set_ylim(low - pad, high + pad)
    for axes in (above, below):
        axes.grid(alpha=0.25, lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
