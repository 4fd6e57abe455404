"""Slice a sequence along its tokens, so that a pipeline works on several slices at once.

TeraPipe (Li et al., ICML 2021): with batch 1 only one of the S stages of a pipeline works at a
time. Cut into K slices, stage s works on slice k while stage s + 1 works on slice k - 1, and one
pass takes ``sum of the slices + (S - 1) * slowest slice``. Later slices attend to all the tokens
before them, so equal slices take different times. If a stage must wait for a message before it
can begin, as later stages do until the first slices reach them, the slice takes its ``hop`` longer.
For each limit on the slowest slice, in ascending order, a dynamic program finds the slices with the
smallest sum. The search ends once even the smallest sum of all could not give a faster pass. The
result is exact for the times passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

#: returns a stage's seconds for the slice of granules [start, stop), which attends to [0, stop)
SliceSeconds = Callable[[int, int], float]


@dataclass(frozen=True)
class Slices:
    """Slices in order, in granules: slice k ends after ``stops[k]`` granules."""

    stops: tuple[int, ...]
    slowest: float  # seconds of the slowest slice on one stage, including its hop
    total: float  # seconds of all slices on one stage

    def seconds(self, stages: int) -> float:
        return self.total + (stages - 1) * self.slowest

    def lengths(self, granule: int) -> tuple[int, ...]:
        """Return the tokens of each slice, for granules of ``granule`` tokens."""
        return tuple(granule * (stop - start) for start, stop in pairwise((0, *self.stops)))


def no_hop(start: int, stop: int) -> float:
    return 0.0


def token_slices(
    granules: int, stages: int, seconds: SliceSeconds, hop: SliceSeconds = no_hop
) -> Slices:
    """Find the slices for which a pass through ``stages`` equal stages is fastest.

    Args:
        granules: most slices of the sequence, at least 1.
        stages: stages of the pipeline, at least 1.
        seconds: returns the seconds of one slice on a stage, until the stage can begin the next
            slice. Never called for empty slices.
        hop: returns the further seconds until the next stage has received the slice.

    Raises ValueError where there is nothing to slice.
    """
    if granules < 1 or stages < 1:
        raise ValueError(f"found {granules} granules on {stages} stages; expected at least 1 each")
    cost = [
        [seconds(start, stop) for start in range(stop)] for stop in range(1, granules + 1)
    ]  # cost[stop - 1][start]
    full = [
        [value + hop(start, stop) for start, value in enumerate(row)]
        for stop, row in enumerate(cost, start=1)
    ]
    unbound = _fewest_seconds(cost, full, float("inf"))
    assert unbound is not None
    best = unbound
    for slowest in sorted({value for row in full for value in row}):
        if unbound.total + (stages - 1) * slowest >= best.seconds(stages):
            break  # all further candidates have a slower slowest slice, and no sum is smaller
        fastest = _fewest_seconds(cost, full, slowest)
        if fastest is not None and fastest.seconds(stages) < best.seconds(stages):
            best = fastest
    return best


def uniform_slices(
    granules: int, count: int, seconds: SliceSeconds, hop: SliceSeconds = no_hop
) -> Slices:
    """Cut ``count`` slices, as equal as granules allow, for comparison. Raises ValueError."""
    if not 1 <= count <= granules:
        raise ValueError(f"found {count} slices of {granules} granules; expected 1 to {granules}")
    return timed_slices([granules * (k + 1) // count for k in range(count)], seconds, hop)


def timed_slices(stops: Sequence[int], seconds: SliceSeconds, hop: SliceSeconds = no_hop) -> Slices:
    """Return the slices that end after ``stops`` granules, with their times."""
    cuts = list(pairwise((0, *stops)))
    times = [seconds(*cut) for cut in cuts]
    slowest = max(time + hop(*cut) for time, cut in zip(times, cuts, strict=True))
    return Slices(tuple(stops), slowest, sum(times))


def _fewest_seconds(
    cost: Sequence[Sequence[float]], full: Sequence[Sequence[float]], slowest: float
) -> Slices | None:
    """Find slices of least total ``cost``, each at most ``slowest`` by ``full``; None: no such."""
    sums, starts = [0.0], [0]
    for row, whole in zip(cost, full, strict=True):
        best, at = float("inf"), -1
        for start, value in enumerate(row):
            if whole[start] <= slowest and sums[start] + value < best:
                best, at = sums[start] + value, start
        sums.append(best)
        starts.append(at)
    if sums[-1] == float("inf"):
        return None
    stops: list[int] = []
    stop = len(cost)
    while stop:
        stops.append(stop)
        stop = starts[stop]
    stops.reverse()
    cuts = list(pairwise((0, *stops)))
    total = sum(cost[stop - 1][start] for start, stop in cuts)
    return Slices(tuple(stops), max(full[stop - 1][start] for start, stop in cuts), total)
