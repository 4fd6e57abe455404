"""Figures with their spread, and curves fitted through measured points."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, NamedTuple, TypeVar

from pydantic import AfterValidator, Field

Key = TypeVar("Key")
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]


#: largest figure of a machine, so that sums and quotients stay finite
LARGEST = 1e30


class Estimate(NamedTuple):
    """A measured or assumed number, with the range in which half of the measurements lie.

    value: the median, in the unit that the field with this figure states.
    low, high: the quartiles; of a figure that was not measured, the range thought possible.
    assumed: the number was written down instead of measured, or computed from such a number.
    """

    value: Number
    low: Number
    high: Number
    assumed: bool = False

    @classmethod
    def exact(cls, value: float, *, assumed: bool = False, spread: float = 0.0) -> Estimate:
        """Return ``value`` with a range of the fraction ``spread`` of it on either side."""
        return cls(value, value * (1 - spread), value * (1 + spread), assumed)

    def plus(self, other: Estimate) -> Estimate:
        """Return the sum; its ``low`` is the sum of the lows, its ``high`` that of the highs."""
        return Estimate(
            self.value + other.value, self.low + other.low, self.high + other.high,
            self.assumed or other.assumed,
        )  # fmt: skip

    def times(self, factor: float) -> Estimate:
        """Return the product with a factor of at least 0."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor, self.assumed)

    def minus(self, other: Estimate) -> Estimate:
        """Return the difference, at least 0, with the width of this figure's range."""
        left = max(0.0, self.value - other.value)
        return Estimate(
            left, max(0.0, left - (self.value - self.low)), left + (self.high - self.value),
            self.assumed or other.assumed,
        )  # fmt: skip

    def inverse(self, size: float) -> Estimate:
        """Return ``size`` over this rate (above 0, units a second), in seconds."""
        return Estimate(
            size / self.value, size / self.high, size / self.low if self.low else size / self.value,
            self.assumed,
        )  # fmt: skip

    @classmethod
    def total(cls, figures: Iterable[Estimate]) -> Estimate:
        """Return the sum of all ``figures``; 0 of none."""
        return functools.reduce(cls.plus, figures, NOTHING)


NOTHING = Estimate(0.0, 0.0, 0.0)


def _ordered(figure: Estimate) -> Estimate:
    if figure.high > LARGEST:
        raise ValueError(f"a figure above {LARGEST:g}")
    if not figure.low <= figure.value <= figure.high:
        raise ValueError("a figure is [value, low, high] with low <= value <= high")
    return figure


#: a figure in a file: ``[value, low, high]``, each at least 0
Stored = Annotated[Estimate, AfterValidator(_ordered)]


@dataclass(frozen=True)
class Curve:
    """Seconds against a size: straight lines (latency and bandwidth) between measured points.

    Sizes below the first point are on the line of the first two points. Sizes above the last point
    are on the line of the last two, or, where that does not rise, follow the slope over all points.
    No extrapolation falls: a larger message that happened to be faster counts as equally fast.
    """

    sizes: tuple[float, ...]
    points: tuple[Estimate, ...]

    @classmethod
    def through(cls, points: Iterable[tuple[float, Estimate]]) -> Curve:
        """Build the curve through ``(size, seconds)``; of equal sizes the last one counts."""
        by_size = dict(sorted(points))
        return cls(tuple(by_size), tuple(by_size.values()))

    def at(self, size: float) -> Estimate:
        """Interpolate or extrapolate the figure at ``size``."""
        sizes = self.sizes
        if len(sizes) == 1:
            # with one point the size is all that is known: no latency, all bandwidth
            return self.points[0].times(size / sizes[0] if sizes[0] else 1.0)
        if size > sizes[-1] and self.points[-1].value <= self.points[-2].value:
            return self.points[-1].plus(Estimate.exact(self._slope() * (size - sizes[-1])))
        right = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
        x0, x1 = sizes[right - 1], sizes[right]
        one, two = self.points[right - 1], self.points[right]
        share = (size - x0) / (x1 - x0)
        ends = [_line(a, b, share) for a, b in zip(one[:3], two[:3], strict=True)]
        value = ends[0]
        assumed = one.assumed or two.assumed
        return Estimate(value, min(ends[1], value), max(ends[2], value), assumed)

    def _slope(self) -> float:
        """Return seconds a unit over all sizes, for a last segment whose slope is noise."""
        rise = self.points[-1].value - self.points[0].value
        return max(0.0, rise / (self.sizes[-1] - self.sizes[0]))


def curves(rows: Iterable[tuple[Key, float, Estimate]]) -> dict[Key, Curve]:
    """Build curves by key, from rows of key, size and seconds."""
    points: dict[Key, list[tuple[float, Estimate]]] = {}
    for key, size, seconds in rows:
        points.setdefault(key, []).append((float(size), seconds))
    return {key: Curve.through(found) for key, found in points.items()}


def _line(start: float, stop: float, share: float) -> float:
    """Interpolate from ``start`` (share 0) to ``stop`` (share 1); never below 0.

    Outside of 0 to 1 the line rises or stays level, even where ``stop`` is below ``start``.
    """
    rise = max(0.0, stop - start)
    if share < 0 and not rise:
        return start
    # between points follow the measurements, even where the larger size was faster
    slope = stop - start if 0 <= share <= 1 else rise
    origin = start if share <= 1 else stop - rise
    return max(0.0, origin + share * slope)


def summary(values: Sequence[float]) -> Estimate:
    """Return median and quartiles of measured values (at least one), nearest ranks."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return Estimate(median(ordered), ordered[round(last / 4)], ordered[round(3 * last / 4)])
