"""Finished trainings, grouped into runs: one run for each way of training."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridcomp.errors import HybridcompError

Curve = NDArray[np.float64]
#: dimension -> direction -> figures
Rows = dict[str, dict[str, dict[str, Any]]]
#: dimension -> for each report, the step and the sampled relative error
Errors = dict[str, list[tuple[float, float]]]
#: steps at the start that do not count for the speed
WARM_UP = 3


#: losses above this have no mean and no gap
LARGEST_LOSS = 1e30


class CompareError(HybridcompError, ValueError):
    """Error of runs that cannot be read or compared; it names file, found and what to do."""


@dataclass(frozen=True)
class LoggedTraining:
    """One training, of one seed. Curves have one element for each step that was logged."""

    source: Path
    steps: Curve  # optimizer steps, increasing
    losses: Curve
    tokens: Curve | None  # tokens trained on until each step
    seconds: Curve | None  # training time from the beginning of the first step
    speeds: Curve | None  # tokens per second
    #: equal in compared runs: {"seed": .., "data": {..}, "model": {..}}, as far as known
    identity: Mapping[str, Any] = field(default_factory=dict)
    #: the DeepSpeed settings, as far as known
    settings: Mapping[str, Any] | None = None
    valid_loss: float | None = None
    ledger: Rows = field(default_factory=dict)  # totals; empty without compression
    sent: Curve | None = None  # MB sent by all ranks until each step; None without a ledger
    errors: Errors = field(default_factory=dict)
    project: str = ""  # W&B project
    group: str = ""

    @property
    def seed(self) -> int | None:
        """Return the seed of weights and data order."""
        found = self.identity.get("seed")
        return None if found is None else int(found)


@dataclass(frozen=True)
class Run:
    """One way of training, once for each seed."""

    label: str
    trainings: Sequence[LoggedTraining]

    @property
    def seeds(self) -> list[int | None]:
        """Return the seeds, in the order of the trainings."""
        return [training.seed for training in self.trainings]

    def speed(self) -> float | None:
        """Return the median tokens per second over all seeds, without warm-up; None if unknown."""
        found = [training.speeds for training in self.trainings if training.speeds is not None]
        if not found:
            return None
        return float(
            np.median(np.concatenate([s[WARM_UP:] if len(s) > WARM_UP else s for s in found]))
        )

    def ledger(self) -> Rows:
        """Return the first seed's totals; fixed-size codecs send the same bytes in all seeds."""
        return self.trainings[0].ledger

    def bits(self) -> str:
        """Name codecs and ratios: ``dp blockint(bits=4) 7.5x; zero ...``; "" for no codec."""
        return "; ".join(
            f"{name} {short(row['codec'])} {row['ratio']:.1f}x"
            for name, row in self.rows()
            if row["codec"] != "none" and row["ratio"]  # a group of one rank sends nothing
        )

    def rows(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the ledger's rows by dimension, with the direction where there are several."""
        return [
            (dimension if len(ways) == 1 else f"{dimension} {way}", row)
            for dimension, ways in self.ledger().items()
            for way, row in ways.items()
        ]


def short(codec: str) -> str:
    """Shorten a codec's name for people: three digits, without rarely changed settings."""
    kept = re.sub(r", (segment=\d+|mode=rel)(?=[,)])", "", codec)
    return re.sub(r"\d+\.\d{4,}(e-?\d+)?", lambda found: f"{float(found[0]):.3g}", kept)


def rises(places: Curve | None) -> bool:
    """Return whether ``places`` are known, finite and ascending: an axis to interpolate along."""
    return places is not None and bool(np.isfinite(places).all() and (np.diff(places) > 0).all())


def check_curve(source: Path, steps: Curve, losses: Curve) -> None:
    """Raise CompareError for a curve that is empty or not finite, or whose steps do not rise."""
    if not len(steps):
        raise CompareError(
            f"{source}: holds no step with a loss; did the run end before it logged one?"
        )
    if not rises(steps):
        raise CompareError(f"{source}: its steps do not rise; expected one record for each")
    bad = ~np.isfinite(losses) | (np.abs(losses) > LARGEST_LOSS)
    if bad.any():
        step = int(steps[bad][0])
        raise CompareError(f"{source}: the loss is not finite at step {step}; nothing to compare")
