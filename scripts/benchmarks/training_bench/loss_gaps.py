"""Compute the held-out loss gap between compressed and native trainings, and its verdict.

The gap of a seed is the loss of the compressed training relative to the native one on the same
text, in percent, averaged over the evaluations in the last fifth of the steps. The interval is
Student's t at 95 % for the mean over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridcomp.tools.compare.statistics import LEAST, half_width, student

Array = NDArray[np.float64]
#: percent: the maximum gap aimed at, and the half width of an interval that decides it
AIM = 0.1
#: maximum number of seeds to ask for
MOST = 1000


class GapError(ValueError):
    """Two logs do not match or hold no evaluations; the message says which."""


@dataclass(frozen=True)
class SeedGap:
    """Gaps of one seed, in percent."""

    seed: int
    batches: int  # per evaluation
    gap: float  # the mean over the evaluations


def evaluations(log: Sequence[Mapping[str, Any]]) -> tuple[list[int], Array]:
    """Return the steps of the evaluations, and the loss of each of their batches."""
    found = [line for line in log if "valid_losses" in line and "step" in line]
    if not found:
        raise GapError("no evaluation on the way")
    return [int(line["step"]) for line in found], np.array([line["valid_losses"] for line in found])


def seed_gap(
    seed: int, native: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]
) -> SeedGap:
    """Return the gap of one seed from two logs. Raises GapError if they do not match."""
    (steps, base), (others, losses) = evaluations(native), evaluations(own)
    if steps != others or base.shape != losses.shape:
        raise GapError(f"seed {seed}: evaluated at steps {others}, native at {steps}")
    if not (np.isfinite(base).all() and np.isfinite(losses).all()):
        raise GapError(f"seed {seed}: a loss is not finite")
    return SeedGap(seed, base.shape[1], float(100 * (losses.mean(1) / base.mean(1) - 1).mean()))


def seeds_for(spread: float, half: float) -> int:
    """Return the fewest seeds with a half interval of at most ``half``; at most MOST.

    ``spread``: standard deviation of the gap over the seeds.
    """
    for seeds in range(LEAST, MOST):
        if student(seeds) * spread / math.sqrt(seeds) <= half:
            return seeds
    return MOST


@dataclass(frozen=True)
class Found:
    """The gap over the seeds, in percent."""

    seeds: list[SeedGap]
    gap: float
    half: float | None  # half interval, None under three seeds
    spread: float  # standard deviation over the seeds

    @property
    def word(self) -> str:
        """Return ``met``, ``refuted`` or ``undecided`` for "the gap is at most AIM"."""
        if self.half is None:
            return "undecided"
        if self.gap + self.half <= AIM:
            return "met"
        return "refuted" if self.gap - self.half > AIM else "undecided"

    @property
    def more(self) -> int:
        """Return how many more seeds would decide at the same gap and spread; 0: none."""
        if self.word != "undecided":
            return 0
        if self.half is None:
            return LEAST - len(self.seeds)
        wanted = seeds_for(self.spread, abs(AIM - self.gap))
        return max(1, wanted - len(self.seeds))

    def told(self, pair_seconds: float) -> str:
        """Describe gap, interval and verdict; ``pair_seconds``: duration of a seed's pair."""
        if self.half is None:
            count = f"{len(self.seeds)} seed{'s' if len(self.seeds) > 1 else ''}"
            return f"gap {self.gap:+.3f} % of {count}: undecided, an interval needs {LEAST}"
        wide = "" if self.half <= AIM else f", wider than the aim of {AIM:g} %"
        said = (
            f"gap {self.gap:+.3f} ± {self.half:.3f} % over {len(self.seeds)} seeds{wide}; at most "
            f"{AIM:g} %: {self.word}"
        )
        if not self.more:
            return said
        if len(self.seeds) + self.more >= MOST:
            return f"{said}: more than {MOST} seeds, as the gap lies where the aim does"
        minutes = self.more * pair_seconds / 60
        return f"{said}: {self.more} more seeds would take {minutes:.0f} minutes"


def found(seeds: Sequence[SeedGap]) -> Found:
    """Return the gap over ``seeds``, at least one. Raises GapError if evaluations differ."""
    if len({one.batches for one in seeds}) != 1:
        raise GapError("the seeds were evaluated on different text")
    gaps = np.array([one.gap for one in seeds])
    spread = float(gaps.std(ddof=1)) if len(gaps) > 1 else math.nan
    return Found(list(seeds), float(gaps.mean()), half_width(gaps), spread)


def of(records: Mapping[int, Mapping[str, Any]], others: Mapping[int, Mapping[str, Any]]) -> Found:
    """Return the gap of ``others`` to ``records`` (trainings by seed), over the seeds in both."""
    both = sorted(set(records) & set(others))
    if not both:
        raise GapError("no seed has both trainings")
    return found([seed_gap(seed, records[seed]["log"], others[seed]["log"]) for seed in both])
