"""Where to slice a sequence along its tokens, so that a pipeline works on several slices at once.

TeraPipe (Li et al., ICML 2021): with batch 1 a pipeline of S stages stands still for all but one
stage. Cut into K slices, stage s works on slice k while stage s + 1 works on slice k - 1, and one
pass takes ``sum of the slices + (S - 1) * slowest slice``. Later slices attend to all the tokens
before them, so equal lengths are not equal times. For every possible slowest slice the dynamic
program finds the smallest sum; slowest slices are tried by rising time, until even the smallest
sum of all cannot win any more. Exact for the times that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

#: seconds of a stage for the granules [start, stop), whose keys and values before start are there
SliceSeconds = Callable[[int, int], float]


@dataclass(frozen=True)
class Slices:
    """Slices in order, in granules: slice k ends where ``stops[k]`` says."""

    stops: tuple[int, ...]
    slowest: float  # seconds of the slowest slice on one stage
    total: float  # seconds of all slices on one stage

    def seconds(self, stages: int) -> float:
        """Seconds of one pass through ``stages`` stages."""
        return self.total + (stages - 1) * self.slowest

    def lengths(self, granule: int) -> tuple[int, ...]:
        """Tokens of each slice, for granules of ``granule`` tokens."""
        return tuple(granule * (stop - start) for start, stop in pairwise((0, *self.stops)))


def token_slices(granules: int, stages: int, seconds: SliceSeconds) -> Slices:
    """The slices with which one pass through ``stages`` equal stages is fastest.

    Args:
        granules: into which the sequence is cut at most, at least 1.
        stages: of the pipeline, at least 1.
        seconds: of one slice on a stage, its message to the next one included. Slices of no
            granule are never asked for.

    Raises ValueError where there is nothing to slice.
    """
    if granules < 1 or stages < 1:
        raise ValueError(f"found {granules} granules on {stages} stages; expected at least 1 each")
    cost = [
        [seconds(start, stop) for start in range(stop)] for stop in range(1, granules + 1)
    ]  # cost[stop - 1][start]
    unbound = _fewest_seconds(cost, float("inf"))
    assert unbound is not None
    best = unbound
    for slowest in sorted({value for row in cost for value in row}):
        if unbound.total + (stages - 1) * slowest >= best.seconds(stages):
            break  # what is left is slower in its slowest slice, and no sum is smaller
        found = _fewest_seconds(cost, slowest)
        if found is not None and found.seconds(stages) < best.seconds(stages):
            best = found
    return best


def uniform_slices(granules: int, count: int, seconds: SliceSeconds) -> Slices:
    """``count`` slices as equal as granules allow, for comparison. Raises ValueError."""
    if not 1 <= count <= granules:
        raise ValueError(f"found {count} slices of {granules} granules; expected 1 to {granules}")
    stops = tuple(granules * (k + 1) // count for k in range(count))
    times = [seconds(start, stop) for start, stop in pairwise((0, *stops))]
    return Slices(stops, max(times), sum(times))


def _fewest_seconds(cost: Sequence[Sequence[float]], slowest: float) -> Slices | None:
    """The smallest sum with no slice above ``slowest``; None where there is none."""
    sums, starts = [0.0], [0]
    for row in cost:
        best, at = float("inf"), -1
        for start, value in enumerate(row):
            if value <= slowest and sums[start] + value < best:
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
    times = [cost[stop - 1][start] for start, stop in pairwise((0, *stops))]
    return Slices(tuple(stops), max(times), list(accumulate(times))[-1])
