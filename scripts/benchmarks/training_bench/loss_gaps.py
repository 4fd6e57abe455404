"""The gap of compressed trainings to native ones on held-out text, and whether it decides.

The gap of a seed is the mean, over the evaluations in the last fifth of the steps, of what the loss
of the compressed training is above that of the native one on the same text, in percent. The
interval is that of the mean over the seeds, by Student's t at 95 %.
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
#: percent: the gap that is aimed at, at most, and half of the interval that tells it
AIM = 0.1
#: seeds beyond which none is asked for
MOST = 1000


class GapError(ValueError):
    """Two logs do not belong together or hold no evaluations; the message says which."""


@dataclass(frozen=True)
class SeedGap:
    """One seed: gaps in percent."""

    seed: int
    batches: int  # batches of an evaluation
    gap: float  # the mean over the evaluations


def evaluations(log: Sequence[Mapping[str, Any]]) -> tuple[list[int], Array]:
    """Return the steps at which held-out text was read, and the loss of each batch there."""
    found = [line for line in log if "valid_losses" in line and "step" in line]
    if not found:
        raise GapError("no evaluation on the way")
    return [int(line["step"]) for line in found], np.array([line["valid_losses"] for line in found])


def seed_gap(
    seed: int, native: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]
) -> SeedGap:
    """Return the gap of one seed from the two logs. Raises GapError where they do not match."""
    (steps, base), (others, losses) = evaluations(native), evaluations(own)
    if steps != others or base.shape != losses.shape:
        raise GapError(f"seed {seed}: evaluated at steps {others}, native at {steps}")
    if not (np.isfinite(base).all() and np.isfinite(losses).all()):
        raise GapError(f"seed {seed}: a loss is not finite")
    return SeedGap(seed, base.shape[1], float(100 * (losses.mean(1) / base.mean(1) - 1).mean()))


def seeds_for(spread: float, half: float) -> int:
    """Return the fewest seeds whose interval is at most ``half`` on either side; MOST at most.

    ``spread``: the standard deviation of the gap over the seeds.
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
    half: float | None  # of the interval, None under three seeds
    spread: float  # standard deviation over the seeds

    @property
    def word(self) -> str:
        """Return ``met``, ``refuted`` or ``undecided``: whether the gap is at most AIM."""
        if self.half is None:
            return "undecided"
        if self.gap + self.half <= AIM:
            return "met"
        return "refuted" if self.gap - self.half > AIM else "undecided"

    @property
    def more(self) -> int:
        """Return how many more seeds the same gap and spread would need to decide; 0: none."""
        if self.word != "undecided":
            return 0
        if self.half is None:
            return LEAST - len(self.seeds)
        wanted = seeds_for(self.spread, abs(AIM - self.gap))
        return max(1, wanted - len(self.seeds))

    def told(self, pair_seconds: float) -> str:
        """Say gap, interval and whether they decide; ``pair_seconds``: what one seed takes."""
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
    """Return the gap over ``seeds``, at least one. Raises GapError for other evaluations."""
    if len({one.batches for one in seeds}) != 1:
        raise GapError("the seeds were evaluated on different text")
    gaps = np.array([one.gap for one in seeds])
    spread = float(gaps.std(ddof=1)) if len(gaps) > 1 else math.nan
    return Found(list(seeds), float(gaps.mean()), half_width(gaps), spread)


def of(records: Mapping[int, Mapping[str, Any]], others: Mapping[int, Mapping[str, Any]]) -> Found:
    """Return the gap of ``others`` to ``records``, kept trainings by seed; of seeds in both."""
    both = sorted(set(records) & set(others))
    if not both:
        raise GapError("no seed has both trainings")
    return found([seed_gap(seed, records[seed]["log"], others[seed]["log"]) for seed in both])
