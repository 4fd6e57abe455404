"""The guard: a dimension whose samples leave their limits is native for the rest of the run.

Every rank adds up its samples. After a step that was sampled they are summed over the job, in one
all-reduce of 36 numbers, so all ranks decide on the same figures and change at the same step.

What error feedback still holds then is not lost: in the first step of the fallback the messages
travel losslessly in fp32 with their residuals added, ``original == sent + residual`` with nothing
left out: only a sum that goes into a 16-bit tensor is rounded to it, once, as upstream's is. From
the next step on upstream sends them itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hybridcomp.codecs import LOSSLESS, Codec
from hybridcomp.policy import DIMENSIONS, Dimension, Direction, Limits, directions_of

Key = tuple[Dimension, Direction]
KEYS: tuple[Key, ...] = tuple((name, way) for name in DIMENSIONS for way in directions_of(name))


@dataclass(frozen=True)
class Trip:
    """Why a dimension fell back."""

    step: int  # the first optimizer step without its codec
    figure: str  # error or residual
    found: float
    limit: float

    def told(self, dimension: Dimension) -> str:
        """One sentence."""
        what = "residual norm over gradient norm" if self.figure == "residual" else "sampled error"
        return (
            f"{dimension}: {what} {self.found:.3g} is over its limit "
            f"(compression.{dimension}.guard.{self.figure}: {self.limit:g}); native from step "
            f"{self.step} on, for the rest of the run"
        )


class Guard:
    """Samples of this rank, limits, and the dimensions that fell back."""

    def __init__(self, limits: Mapping[Dimension, Limits]) -> None:
        self._limits = {name: found for name, found in limits.items() if found.any}
        self.trips: dict[Dimension, Trip] = {}
        self._samples = torch.zeros(len(KEYS), 3, dtype=torch.float64)

    @property
    def watching(self) -> bool:
        """Whether any dimension is left to fall back; equal on all ranks."""
        return any(name not in self.trips for name in self._limits)

    def sample(self, key: Key, error_sq: float, value_sq: float, residual_sq: float) -> None:
        """Add one sample: squared L2 norms of an error, of its values, of their residual."""
        self._samples[KEYS.index(key)] += torch.tensor([error_sq, value_sq, residual_sq])

    def decide(self, step: int, device: torch.device) -> list[Dimension]:
        """Hold the samples of all ranks against the limits; a collective.

        ``step``: the next one. Returns the dimensions that fall back from it on.
        """
        samples = self._samples.to(device)
        self._samples = torch.zeros_like(self._samples)
        dist.all_reduce(samples)
        rows = dict(zip(KEYS, samples.tolist(), strict=True))
        fallen = []
        for name, limits in self._limits.items():
            trips = [_held(limits, rows[name, way], step) for way in directions_of(name)]
            trip = next((found for found in trips if found is not None), None)
            if trip is not None and name not in self.trips:
                self.trips[name] = trip
                fallen.append(name)
        return fallen

    def native(self, dimension: Dimension, step: int) -> bool:
        """Whether messages of ``step`` have lost their codec."""
        trip = self.trips.get(dimension)
        return trip is not None and step >= trip.step

    def flush(self, dimension: Dimension, step: int) -> Codec | None:
        """The lossless codec that takes the residuals along in the first step of a fallback."""
        return self.lossless if self.trips[dimension].step == step else None

    @property
    def lossless(self) -> Codec:
        """What takes residuals along, with nothing left out."""
        return LOSSLESS

    def flushed(self, dimension: Dimension, step: int) -> bool:
        """Whether no message will take residuals of ``dimension`` any more."""
        trip = self.trips.get(dimension)
        return trip is not None and step > trip.step

    def state(self) -> dict[str, dict[str, Any]]:
        """What a resumed run has to know."""
        return {name: vars(trip).copy() for name, trip in self.trips.items()}

    def restore(self, state: Mapping[str, Mapping[str, Any]]) -> list[Dimension]:
        """Take over ``state``; returns the dimensions that it adds. The rest of a run is not over
        when an older checkpoint is loaded: what fell back stays so.
        """
        added: list[Dimension] = []
        for name in DIMENSIONS:
            if name in state and name not in self.trips:
                self.trips[name] = Trip(**state[name])
                added.append(name)
        return added


def _held(limits: Limits, sums: Sequence[float], step: int) -> Trip | None:
    error_sq, value_sq, residual_sq = sums
    if not value_sq:
        return None  # nothing was sampled, or only zeros
    for figure, limit, square in (
        ("error", limits.error, error_sq),
        ("residual", limits.residual, residual_sq),
    ):
        found = math.sqrt(square / value_sq) if math.isfinite(square) else math.inf
        if limit is not None and found > limit:
            return Trip(step, figure, found, limit)
    return None
