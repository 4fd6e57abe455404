"""Align runs by tokens and by wall clock, and compute their gaps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridcomp.tools.compare.reading import pair
from hybridcomp.tools.compare.runs import CompareError, Curve, LoggedTraining, Run

#: fewest seeds with an interval: for two, Student's t is 12.7, which makes it useless
LEAST = 3
#: two-sided 95% quantiles of Student's t, by degrees of freedom; ``student`` has those beyond
STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
#: the same quantile of the normal distribution
NORMAL = 1.96

#: gap in percent that one seed cannot show: seeds alone differ by more
SMALL = 0.1
#: a run needs this many times the points of the final average, or its gap is not reported
ENOUGH = 2
#: points of a line of a chart; W&B draws at most 10,000 rows of a table
POINTS = 400


@dataclass(frozen=True)
class Aligned:
    """Runs on one axis."""

    unit: str  # unit of the axis: "tokens" or "steps"
    axis: Curve  # (points,)
    losses: list[Curve]  # losses of each run: (seeds, points)
    seconds: list[Curve] | None  # seconds of each run: (seeds, points); None if unknown
    sent: list[Curve | None]  # MB sent by each run: (seeds, points); None without its ledger
    notes: list[str]


@dataclass(frozen=True)
class Comparison:
    """One run against the baseline; gaps in percent, means over the seeds."""

    label: str
    final_loss: float  # mean over seeds and the last points
    gap: float
    gap_interval: float | None  # half-width of the 95% interval; None under LEAST seeds
    gaps: list[float]  # gap of each seed, in the run's order
    valid_loss: float | None
    valid_gap: float | None
    seconds: float | None  # training seconds until the end of the axis
    #: gap when the faster of run and baseline ended, at equal wall clock; None without clocks
    clock_gap: float | None
    clock_gap_interval: float | None
    clock_gaps: list[float] | None  # gap of each seed
    #: gap at equal bytes: all those of the run or baseline that sent fewer; None if unknown
    byte_gap: float | None
    byte_gap_interval: float | None
    byte_gaps: list[float] | None  # gap of each seed


def align(runs: Sequence[Run], last: int) -> Aligned:
    """Put runs on one axis: tokens if all runs know them, else optimizer steps.

    The axis has the points of the training with the fewest points, up to the end of the shortest
    training; losses of other trainings are interpolated, and a note says so. Raises CompareError if
    too few points are left.
    """
    trainings = [training for run in runs for training in run.trainings]
    unit = "tokens" if all(t.tokens is not None for t in trainings) else "steps"
    axes = [_axis(training, unit) for training in trainings]
    notes = []
    begin, end = max(axis[0] for axis in axes), min(axis[-1] for axis in axes)
    axis = min(axes, key=len)
    axis = axis[(axis >= begin) & (axis <= end)]
    if len(axis) < min(last, min(map(len, axes))) or not len(axis):
        raise CompareError(
            f"the runs have {len(axis)} points in common, from {begin:g} to {end:g} {unit}, fewer "
            f"than the {last} last ones that the final loss is the mean of; compare longer runs"
        )
    longest = max(axes, key=lambda found: float(found[-1]))
    if longest[-1] > end:
        notes.append(
            f"compared up to {end:g} {unit}, where the shortest run ends, of {longest[-1]:g}"
        )
    if any(not np.array_equal(other[: len(axis)], axis) for other in axes):
        notes.append(f"runs logged at different {unit}: interpolated")
    losses, seconds, sent = (
        [_along(run, axis, unit, name) for run in runs] for name in ("losses", "seconds", "sent")
    )
    clocks = [curves for curves in seconds if curves is not None]
    return Aligned(
        unit, axis, [curves for curves in losses if curves is not None],
        clocks if len(clocks) == len(runs) else None, sent, notes,
    )  # fmt: skip


def _axis(training: LoggedTraining, unit: str) -> Curve:
    found = training.tokens if unit == "tokens" else training.steps
    assert found is not None
    return found


def _along(run: Run, axis: Curve, unit: str, name: str) -> Curve | None:
    """Return a curve of a run's seeds along the axis: (seeds, points); None if a seed lacks it."""
    curves = [(_axis(training, unit), getattr(training, name)) for training in run.trainings]
    if any(curve is None for _, curve in curves):
        return None
    return np.stack([np.interp(axis, places, curve) for places, curve in curves])


def compare(runs: Sequence[Run], aligned: Aligned, last: int) -> list[Comparison]:
    """Compare every run with the first, by seed. Raises CompareError for unpaired seeds."""
    return [_compare(runs, aligned, number, last) for number in range(len(runs))]


def _compare(runs: Sequence[Run], aligned: Aligned, number: int, last: int) -> Comparison:
    baseline, run = runs[0], runs[number]
    order = pair(baseline, run)
    final = aligned.losses[number][:, -last:].mean(axis=1)
    base = aligned.losses[0][order, -last:].mean(axis=1)
    if not base.all():
        raise CompareError(f"{baseline.label}: its final loss is 0, of which nothing is a share")
    gaps = percent(final, base)
    pairs = [
        (run.trainings[i].valid_loss, baseline.trainings[j].valid_loss) for i, j in enumerate(order)
    ]
    known = [(own, other) for own, other in pairs if own is not None and other is not None]
    valid = valid_gap = None
    if len(known) == len(pairs):
        own, other = np.array(known).T
        valid = float(own.mean())
        valid_gap = float(percent(own, other).mean()) if other.all() else None
    clocks = None if aligned.seconds is None else (aligned.seconds[number], aligned.seconds[0])
    clock = gaps_along(clocks, aligned, number, order, last)
    moved = gaps_along((aligned.sent[number], aligned.sent[0]), aligned, number, order, last)
    seconds = None if aligned.seconds is None else float(aligned.seconds[number][:, -1].mean())
    return Comparison(
        run.label, float(final.mean()), float(gaps.mean()), half_width(gaps), gaps.tolist(),
        valid, valid_gap, seconds, *_summary(clock), *_summary(moved),
    )  # fmt: skip


def _summary(gaps: Curve | None) -> tuple[float | None, float | None, list[float] | None]:
    """Return the mean of the seeds' gaps, its interval and the gaps; None for unknown gaps."""
    if gaps is None:
        return None, None, None
    return float(gaps.mean()), half_width(gaps), gaps.tolist()


def noise(aligned: Aligned, number: int, order: Sequence[int], last: int) -> float | None:
    """Return half of the 95% interval of a gap, in percent, from differences between steps.

    The final gap is the mean of the gaps of the ``last`` points. Differences between gaps of
    consecutive points give the random error of that mean, without a slow trend in the gap. Returns
    None for fewer than three points.
    """
    ends = aligned.losses[number][:, -last:], aligned.losses[0][order, -last:]
    if ends[0].shape[1] < 3 or not ends[1].all():
        return None
    steps = np.diff(percent(*ends), axis=1)
    spread = math.sqrt(float((steps**2).mean()) / 2)  # a difference has the variance of two points
    return 1.96 * spread / math.sqrt(ends[0].size)


def caveats(
    runs: Sequence[Run], aligned: Aligned, comparisons: Sequence[Comparison], last: int
) -> list[str]:
    """Return notes on the gaps: too few steps or seeds, or one seed's gap against its noise."""
    found = []
    points = len(aligned.axis)
    if points < ENOUGH * last:
        found.append(
            f"{points} points are few: the final loss is the mean of the last {min(last, points)}, "
            f"over which the loss still changes; read no gap from fewer than {ENOUGH * last}"
        )
    counts = {len(comparison.gaps) for comparison in comparisons[1:]}
    if any(1 < count < LEAST for count in counts):
        found.append(f"two seeds: the range of their gaps is shown; {LEAST} give an interval")
    for number, comparison in enumerate(comparisons[1:], 1):
        if len(comparison.gaps) > 1 or abs(comparison.gap) < SMALL:
            continue
        chance = noise(aligned, number, pair(runs[0], runs[number]), last)
        if chance is not None:
            side = "beyond" if abs(comparison.gap) > chance else "within"
            found.append(
                f"{comparison.label}: its gap of {comparison.gap:+.2f} % is {side} the noise "
                f"between neighbouring steps (± {chance:.2g} %); one seed does not show how seeds "
                "differ"
            )
    return found


def gaps_along(
    spent: tuple[Curve | None, Curve | None] | None,
    aligned: Aligned,
    number: int,
    order: Sequence[int],
    last: int,
) -> Curve | None:
    """Return each seed's gap to the baseline, in percent, at equal wall clock or bytes: (seeds,).

    For each seed, run and baseline are compared at the end of the one that spent less, by the mean
    loss of the ``last`` points before. ``spent``: seconds or bytes up to each point, of the run and
    of the baseline, (seeds, points) each; None if unknown. Returns None also where the baseline's
    loss is 0.
    """
    if spent is None or spent[0] is None or spent[1] is None:
        return None
    gaps = []
    for own, other in enumerate(order):
        clocks = spent[0][own], spent[1][other]
        curves = aligned.losses[number][[own]], aligned.losses[0][[other]]
        stop = min(float(clock[-1]) for clock in clocks)
        loss, base = (
            float(np.interp(stop, clock, running_mean(curve, last)[0]))
            for clock, curve in zip(clocks, curves, strict=True)
        )
        if not base:
            return None
        gaps.append(float(percent(loss, base)))
    return np.array(gaps)


def percent(own: Curve | float, base: Curve | float) -> Curve:
    """Return by how many per cent losses exceed ``base``, also a negative one; NaN where it is 0.

    Losses of reinforcement learning are 0 at the first step, and negative ones are usual.
    """
    size = np.abs(base)
    return np.asarray(100 * (own - base) / np.where(size, size, np.nan))


def running_mean(curves: Curve, window: int) -> Curve:
    """Average the last ``window`` points of each row; fewer at its start."""
    sums = np.cumsum(curves, axis=1)
    sums[:, window:] = sums[:, window:] - sums[:, :-window]
    counts = np.minimum(np.arange(1, curves.shape[1] + 1), window)
    return np.asarray(sums / counts)


def gap_curves(runs: Sequence[Run], aligned: Aligned, number: int, window: int) -> Curve:
    """Return each seed's gap in percent of smoothed losses to the baseline: (seeds, points)."""
    own = running_mean(aligned.losses[number], window)
    other = running_mean(aligned.losses[0][pair(runs[0], runs[number])], window)
    return percent(own, other)


def thin(curve: Curve) -> list[float]:
    """Return at most ``POINTS`` values of ``curve``, evenly spaced, with the first and the last."""
    places = np.unique(np.linspace(0, len(curve) - 1, min(POINTS, len(curve))).round().astype(int))
    return [float(value) for value in curve[places]]


def half_width(values: Curve) -> float | None:
    """Return half of the 95% interval of the mean, by Student's t; None under LEAST values."""
    count = len(values)
    if count < LEAST:
        return None
    return float(student(count) * values.std(ddof=1) / math.sqrt(count))


def student(count: int) -> float:
    """Return Student's two-sided 95% quantile for the mean of ``count`` values, two or more.

    Beyond the table by Fisher's expansion (Abramowitz and Stegun, 26.7.5), right to three digits.
    """
    if count - 2 < len(STUDENT):
        return STUDENT[count - 2]
    z, free = NORMAL, count - 1
    return z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
