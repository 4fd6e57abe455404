"""Guard: switch a dimension whose samples exceed their limits to native for the rest of the run.

Every rank adds up its samples. After a sampled step they are summed over the job, in one
all-reduce of three numbers for each dimension and direction, so all ranks decide on the same
figures and change at the same step.

A fallback loses no residuals: in the first step of the fallback the messages travel losslessly in
fp32 with their residuals added (``original == sent + residual`` with a residual of zero); only a
sum stored in a 16-bit tensor is rounded, once, as in upstream. From the next step on upstream sends
the messages itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hybridcomp.codecs import LOSSLESS, Codec
from hybridcomp.config.policy import Limits
from hybridcomp.dimensions import DIMENSIONS, KEYS, ROWS, Dimension, Key
from hybridcomp.job import saved, small_messages


@dataclass(frozen=True)
class Trip:
    """Reason and step of a dimension's fallback to native."""

    step: int  # the first optimizer step without its codec
    figure: str  # measured quantity that exceeded its limit: error or residual
    found: float
    limit: float

    def describe(self, dimension: Dimension) -> str:
        """Return a sentence for the user."""
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
        self._samples = torch.zeros(len(KEYS), 3, dtype=torch.float64, device="cpu")

    @property
    def watching(self) -> bool:
        """Return whether any dimension with limits has not fallen back; equal on all ranks."""
        return any(name not in self.trips for name in self._limits)

    def sample(self, key: Key, error_sq: float, value_sq: float, residual_sq: float) -> None:
        """Add one sample: squared L2 norms of an error, its values and their residual."""
        row = self._samples[KEYS.index(key)]
        row += torch.tensor([error_sq, value_sq, residual_sq], dtype=row.dtype, device="cpu")

    def decide(self, step: int, device: torch.device) -> list[Dimension]:
        """Sum the samples over all ranks and compare them with the limits; a collective.

        ``step``: the next step, from which the returned dimensions are native.
        """
        samples = small_messages.total(self._samples.to(device, copy=True, non_blocking=True))
        self._samples = torch.zeros_like(self._samples)
        rows = dict(zip(KEYS, samples.tolist(), strict=True))
        fallen = []
        for name, limits in self._limits.items():
            trips = [_held(limits, rows[name, way], step) for way in ROWS[name].directions]
            trip = next((found for found in trips if found is not None), None)
            if trip is not None and name not in self.trips:
                self.trips[name] = trip
                fallen.append(name)
        return fallen

    def native(self, dimension: Dimension, step: int) -> bool:
        """Return whether ``dimension`` has fallen back at ``step``."""
        trip = self.trips.get(dimension)
        return trip is not None and step >= trip.step

    def flush(self, dimension: Dimension, step: int) -> Codec | None:
        """Return the lossless codec that sends residuals, in a fallback's first step, or None."""
        return LOSSLESS if self.trips[dimension].step == step else None

    def flushed(self, dimension: Dimension, step: int) -> bool:
        """Return whether ``dimension`` has sent its residuals and needs none any more."""
        trip = self.trips.get(dimension)
        return trip is not None and step > trip.step

    def go_back(self, step: int) -> list[Dimension]:
        """Keep dimensions that fell back after ``step`` native from there on; return them."""
        later = [name for name, trip in self.trips.items() if trip.step > step]
        self.trips.update({name: replace(self.trips[name], step=step) for name in later})
        return later

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the trips, for a checkpoint."""
        return {name: vars(trip).copy() for name, trip in self.trips.items()}

    def restore(self, state: Mapping[str, Mapping[str, Any]]) -> list[Dimension]:
        """Restore ``state``; return the dimensions that it adds."""
        added: list[Dimension] = []
        for name in DIMENSIONS:
            if name in state and name not in self.trips:
                self.trips[name] = Trip(**state[name])
                added.append(name)
        return added


def are_trips(value: Any) -> bool:
    """Return whether ``value`` has the form of ``Guard.state``; unknown dimensions are ignored."""
    return isinstance(value, dict) and all(
        isinstance(trip, dict)
        and set(trip) == {"step", "figure", "found", "limit"}
        and saved.is_count(trip["step"])
        and trip["figure"] in ("error", "residual")
        and all(isinstance(trip[key], (int, float)) for key in ("found", "limit"))
        for name, trip in value.items()
        if name in DIMENSIONS
    )


def _held(limits: Limits, sums: Sequence[float], step: int) -> Trip | None:
    error_sq, value_sq, residual_sq = sums
    if not value_sq:
        return None  # all samples are zero, or there are none
    for figure, limit, square in (
        ("error", limits.error, error_sq),
        ("residual", limits.residual, residual_sq),
    ):
        found = math.sqrt(square / value_sq) if math.isfinite(square) else math.inf
        if limit is not None and found > limit:
            return Trip(step, figure, found, limit)
    return None
