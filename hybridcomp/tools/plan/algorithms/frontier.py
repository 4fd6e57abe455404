"""Pareto frontiers of pairs of costs, with the choices that led to each point."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """One way to reach a state: two costs, both to be small, and the choices made."""

    first: float
    second: float
    choices: Linked | None


def frontier(points: Iterable[Point]) -> list[Point]:
    """Return the points that no other point beats in both costs, by rising first cost.

    Of points with equal costs it keeps the first.
    """
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (point.first, point.second)):
        if not kept or point.second < kept[-1].second:
            kept.append(point)
    return kept


def link(choices: Linked | None) -> Iterator[int]:
    """Return the values of a linked list of choices, oldest first."""
    values = []
    while choices is not None:
        values.append(choices.value)
        choices = choices.before
    return reversed(values)


@dataclass(frozen=True)
class Linked:
    """A choice and those before it; sharing tails keeps a frontier's memory small."""

    value: int
    before: Linked | None
