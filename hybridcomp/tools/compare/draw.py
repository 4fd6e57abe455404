"""Draw a comparison: loss over tokens and wall clock, and underneath the gap to the baseline."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from hybridcomp import escaping
from hybridcomp.errors import install_hint
from hybridcomp.tools.compare.report import Result, mean_gap
from hybridcomp.tools.compare.runs import CompareError
from hybridcomp.tools.compare.statistics import gap_curves, running_mean

#: distinct for colour-blind readers too (Okabe and Ito); the baseline is grey and wide, so that it
#: can be seen below a curve that covers it
COLOURS = ("#9A9A9A", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#A6761D")
#: line styles of the runs that come after each colour was used once
DASHES = ("-", "--", ":", "-.")
#: fraction of a run that the scale of the gap panel ignores: early gaps are noise
SETTLED = 1 / 3
#: fraction of a run, at its start, whose high losses may exceed the panel
FALL = 0.05


def draw(result: Result, path: Path, smooth: int, title: str) -> None:
    """Draw into the PNG ``path``. ``smooth``: points of the running mean, 0: 1/20 of the run.

    Raises CompareError when matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise CompareError(f"the picture needs matplotlib: {install_hint('plot')}") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    window = smooth or max(1, len(result.aligned.axis) // 20)
    figure = pyplot.figure(figsize=(10, 6.6), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(1.6, 1))
    tokens = figure.add_subplot(grid[0, 0])
    clocks = result.aligned.seconds
    clock = None if clocks is None else figure.add_subplot(grid[0, 1], sharey=tokens)
    gaps = figure.add_subplot(grid[1, 0], sharex=tokens)
    words = figure.add_subplot(grid[:, 1] if clock is None else grid[1, 1])
    for number in range(len(result.runs)):
        style = style_of(number)
        smoothed = running_mean(result.aligned.losses[number], window).mean(axis=0)
        tokens.plot(
            result.aligned.axis, smoothed, label=escaping.picture(_legend(result, number)), **style
        )
        if clock is not None and clocks is not None:
            clock.plot(clocks[number].mean(axis=0), smoothed, **style)
            clock.set_xlabel("seconds of training")
        if number:
            _gap(gaps, result, number, window, style)
    figure.suptitle(escaping.picture(title))
    _label(result, tokens, gaps, window)
    for axes in (tokens, gaps) if clock is None else (tokens, clock, gaps):
        axes.grid(alpha=0.25, lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
    _words(words, tokens, crowded=clock is not None)
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the font lacks a glyph and draws a box
        figure.savefig(path, dpi=100)
    pyplot.close(figure)


def style_of(number: int) -> dict[str, Any]:
    """Return the line style of run ``number``, different for up to 29 runs; 0 is the baseline."""
    if not number:
        return {"color": COLOURS[0], "lw": 4.0, "solid_capstyle": "round"}
    round_, colour = divmod(number - 1, len(COLOURS) - 1)
    dash = DASHES[round_ % len(DASHES)]
    return {"color": COLOURS[1 + colour], "lw": 1.5, "linestyle": dash, "solid_capstyle": "round"}


def _gap(axes: Any, result: Result, number: int, window: int, style: dict[str, Any]) -> None:
    curves = gap_curves(result.runs, result.aligned, number, window)
    axes.plot(result.aligned.axis, curves.mean(axis=0), **style)
    if len(curves) > 1:
        axes.fill_between(
            result.aligned.axis,
            curves.min(axis=0),
            curves.max(axis=0),
            color=style["color"],
            alpha=0.15,
            lw=0,
        )


def _legend(result: Result, number: int) -> str:
    found, run = result.comparisons[number], result.runs[number]
    gap = f" ({mean_gap(found.gaps)} %)" if number else ""
    bits = run.bits().replace("; ", "\n")
    name = escaping.one_line(run.label)
    return f"{name}: {found.final_loss:.3f}{gap}" + (f"\n{bits}" if bits else "")


def _words(axes: Any, curves: Any, crowded: bool) -> None:
    """Draw the legend into a separate panel, smaller if it is long and the panel ``crowded``."""
    handles, labels = curves.get_legend_handles_labels()
    lines = sum(label.count("\n") + 1 for label in labels)
    two = crowded and lines > 17
    axes.axis("off")
    legend = axes.legend(
        handles, labels, loc="center left", frameon=False, alignment="left",
        title="final loss (gap to the baseline), bytes against native",
        fontsize=7 if two else 8 if crowded and lines > 12 else 9, ncols=2 if two else 1,
        borderaxespad=0, handlelength=1.4, columnspacing=0.8,
    )  # fmt: skip
    legend.set_in_layout(False)  # do not let the legend narrow the curves


def _label(result: Result, tokens: Any, gaps: Any, window: int) -> None:
    """Label the axes with units, and scale them to the end of the run."""
    from matplotlib import ticker

    seeds = len(result.runs[0].trainings)
    over = f", mean of {seeds} seeds" if seeds > 1 else ""
    tokens.set_ylabel(f"loss (nats per token)\n{window}-point mean{over}")
    for axes in (tokens, gaps):
        axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    tokens.set_xlabel(result.aligned.unit if result.aligned.unit == "tokens" else "optimizer step")
    smoothed = [running_mean(curves, window).mean(axis=0) for curves in result.aligned.losses]
    skip = int(len(result.aligned.axis) * FALL)
    low, high = min(c.min() for c in smoothed), max(c[skip:].max() for c in smoothed)
    tokens.set_ylim(low - 0.03 * (high - low), high + 0.03 * (high - low) + 1e-9)
    gaps.axhline(0, color=COLOURS[0], lw=3)
    gaps.set_ylabel("gap to the baseline (%)")
    bands = " (bands: range over the seeds)" if seeds > 1 else ""
    gaps.set_xlabel(f"{result.aligned.unit}{bands}")
    start = int(len(result.aligned.axis) * SETTLED)
    settled = [
        gap_curves(result.runs, result.aligned, number, window)[:, start:]
        for number in range(1, len(result.runs))
    ]
    reached = np.concatenate([np.zeros(1), *(curves[np.isfinite(curves)] for curves in settled)])
    low, high = float(reached.min()), float(reached.max())
    pad = max(0.15 * (high - low), 0.1)
    gaps.set_ylim(low - pad, high + pad)
