"""Sets of time as lists of intervals, in nanoseconds: sorted and disjoint."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from operator import itemgetter

#: begin and end of an interval
Stretch = tuple[int, int]


def union(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Return the union of ``stretches``, which may overlap."""
    found: list[Stretch] = []
    for start, stop in sorted(stretches):
        if stop <= start:
            continue
        if found and start <= found[-1][1]:
            if stop > found[-1][1]:
                found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def both(one: Sequence[Stretch], other: Sequence[Stretch]) -> list[Stretch]:
    """Return the intersection of two sets."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        start, stop = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < stop:
            found.append((start, stop))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(one: Sequence[Stretch], other: Sequence[Stretch]) -> list[Stretch]:
    """Return ``one`` minus ``other``."""
    found, j = [], 0
    for start, stop in one:
        while j < len(other) and other[j][1] <= start:
            j += 1
        k = j
        while k < len(other) and other[k][0] < stop:
            if other[k][0] > start:
                found.append((start, other[k][0]))
            start = max(start, other[k][1])
            k += 1
        if start < stop:
            found.append((start, stop))
    return found


def within(one: Sequence[Stretch], window: Stretch) -> list[Stretch]:
    """Return the part of ``one`` inside ``window``."""
    first = bisect_right(one, window[0], key=itemgetter(1))
    last = bisect_left(one, window[1], key=itemgetter(0))
    return [(max(s, window[0]), min(e, window[1])) for s, e in one[first:last]]


def length(one: Iterable[Stretch]) -> int:
    """Return the total length of a set, in nanoseconds."""
    return sum(stop - start for start, stop in one)
