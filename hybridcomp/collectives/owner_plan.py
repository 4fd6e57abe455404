"""Plan the reduction of a bucket whose ranges have owners: which rank sums, which ranks receive.

The same buckets come every step, and a plan depends only on a bucket's ranges, so plans are cached.
A group looks its plans up by the identity of the tuple of ranges: hashing 4,096 ranges takes 3 ms.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import Literal, TypeVar

from torch import Tensor

from hybridcomp.collectives.wire.chunking import (
    OwnedRange,
    Range,
    chunk_ranges,
    cut_rows,
    stretches,
)
from hybridcomp.errors import CodecError

PlanKind = Literal["direct", "balanced"]
Key = TypeVar("Key")
#: alignment, in elements, of a run's sum in the tensor of all sums, for vector loads
PLACE_ALIGN = 32


@dataclass(frozen=True)
class OwnedPart:
    """Part of a range that lies in one chunk, for the second hop of the balanced plan."""

    start: int
    stop: int
    ranks: tuple[int, ...]
    source: int  # group rank that computes the sum

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def stays(self) -> bool:
        """Return whether only the summing rank needs the sum, so that it is not quantized again."""
        return self.ranks == (self.source,)


@dataclass(frozen=True)
class OwnerPlan:
    """Plan of the reduction of one bucket.

    Attributes:
        kind: ``direct``: every rank sends its values to the owners; ``balanced``: each rank sums
            one chunk of an even split and sends the sums to their owners.
        numel: elements of the bucket.
        runs: nonempty ranges, with neighbours of the same owners merged.
        longest: elements of the longest row, which ``round_count`` cuts. A row is all that goes to
            one set of owners; in a balanced plan all that goes there from one rank.
        sole: whether every range has one owner.
        even: in a balanced plan, the direct plan of the even split; else None.
    """

    kind: PlanKind
    numel: int
    ranges: tuple[OwnedRange, ...]
    runs: tuple[OwnedRange, ...]
    longest: int
    sole: bool
    even: OwnerPlan | None = None

    def sums_of(self, rank: int) -> OwnedSums:
        """Return where the sums of group rank ``rank`` lie in one tensor."""
        starts, places, numel = [], [], 0
        for run in self.runs:
            if rank in run.ranks:
                starts.append(run.start)
                places.append(numel)
                numel += -(-(run.stop - run.start) // PLACE_ALIGN) * PLACE_ALIGN
        sums, results = OwnedSums(numel, starts, places, []), []
        for owned in self.ranges:
            if rank in owned.ranks:
                place = sums.place_of(owned.start) if owned.start < owned.stop else 0
                results.append((place, place + owned.stop - owned.start))
        return replace(sums, results=results)


@dataclass(frozen=True)
class OwnedSums:
    """Positions of one rank's sums in a flat fp32 tensor, run after run.

    Attributes:
        numel: elements of the tensor.
        starts, places: start of each run in the bucket, and in the tensor.
        results: ``[start, stop)`` in the tensor of every range that the rank owns, in order.
    """

    numel: int
    starts: list[int]
    places: list[int]
    results: list[Range]

    def place_of(self, start: int) -> int:
        """Return where element ``start`` of the bucket, inside a run, lies in the tensor."""
        run = bisect_right(self.starts, start) - 1
        return self.places[run] + start - self.starts[run]

    def part(self, sums: Tensor, start: int, stop: int) -> Tensor:
        """Return elements ``[start, stop)`` of the bucket, inside a run, from ``sums``."""
        place = self.place_of(start)
        return sums[place : place + stop - start]


@lru_cache(maxsize=4096)
def plan_of(ranges: tuple[OwnedRange, ...], world_size: int) -> OwnerPlan:
    """Return the plan for ``ranges``, the same on all ranks.

    Of the direct and the balanced plan it chooses the one in which the busiest rank sends or
    receives fewer elements; on a tie the direct plan, which quantizes only once. The owner of a
    whole bucket receives ``W - 1`` times the bucket's length in the direct plan, at most twice its
    length in the balanced plan.

    Raises CodecError unless the ranges follow each other from 0 and have distinct known owners.
    """
    _check_ranges(ranges, world_size)
    numel = ranges[-1].stop if ranges else 0
    even = even_ranges(numel, world_size)
    traffic = [[0, 0] for _ in range(world_size)]
    for part in cut_at_chunks(ranges, world_size):
        for rank in part.ranks:
            if rank != part.source:
                traffic[part.source][0] += part.numel
                traffic[rank][1] += part.numel
    balanced = _busiest(_direct_traffic(even, world_size)) + _busiest(traffic)
    direct = _busiest(_direct_traffic(ranges, world_size))
    plan = direct_plan(ranges)
    if direct <= balanced:
        return plan
    parts = cut_at_chunks(plan.runs, world_size)
    longest = _longest([((part.source, part.ranks), part.numel) for part in parts])
    return replace(plan, kind="balanced", longest=longest, even=direct_plan(tuple(even)))


def direct_plan(ranges: tuple[OwnedRange, ...]) -> OwnerPlan:
    """Return the plan in which every rank sends its values directly to the owners."""
    runs = tuple(merge_neighbours([owned for owned in ranges if owned.start < owned.stop]))
    longest = _longest([(run.ranks, run.stop - run.start) for run in runs])
    sole = all(len(run.ranks) == 1 for run in runs)
    return OwnerPlan("direct", ranges[-1].stop if ranges else 0, ranges, runs, longest, sole)


def _check_ranges(ranges: Sequence[OwnedRange], world_size: int) -> None:
    position = 0
    for owned in ranges:
        if owned.start != position or owned.stop < owned.start:
            raise CodecError(f"ranges: expected a range from {position}, found {owned}")
        known = all(0 <= rank < world_size for rank in owned.ranks)
        if not owned.ranks or not known or len(set(owned.ranks)) != len(owned.ranks):
            raise CodecError(
                f"ranges: expected distinct group ranks below {world_size}, found {owned}"
            )
        position = owned.stop


def even_ranges(numel: int, world_size: int) -> list[OwnedRange]:
    """Return the chunks of ``chunk_ranges`` as ranges; rank r owns chunk r."""
    chunks = chunk_ranges(numel, world_size)
    return [OwnedRange(start, stop, (rank,)) for rank, (start, stop) in enumerate(chunks)]


def cut_at_chunks(ranges: Sequence[OwnedRange], world_size: int) -> list[OwnedPart]:
    """Cut the ranges at the borders of ``chunk_ranges``; the parts are in order."""
    chunks = chunk_ranges(max((owned.stop for owned in ranges), default=0), world_size)
    size = chunks[0][1] or 1
    return [
        OwnedPart(max(low, owned.start), min(high, owned.stop), owned.ranks, source)
        for owned in ranges
        if owned.start < owned.stop
        for source in range(owned.start // size, (owned.stop - 1) // size + 1)
        for low, high in (chunks[source],)
    ]


def _direct_traffic(ranges: Sequence[OwnedRange], world_size: int) -> list[list[int]]:
    """Return ``[sent, received]`` elements of every rank if all send directly to the owners."""
    owns = [0] * world_size
    copies = 0  # elements sent by a rank that owns nothing
    for owned in ranges:
        copies += (owned.stop - owned.start) * len(owned.ranks)
        for rank in owned.ranks:
            owns[rank] += owned.stop - owned.start
    return [[copies - own, (world_size - 1) * own] for own in owns]


def _busiest(traffic: Sequence[Sequence[int]]) -> int:
    return max(max(row) for row in traffic)


def _longest(lengths: Sequence[tuple[Key, int]]) -> int:
    totals: dict[Key, int] = {}
    for key, numel in lengths:
        totals[key] = totals.get(key, 0) + numel
    return max(totals.values(), default=0)


def merge_neighbours(ranges: Sequence[OwnedRange]) -> list[OwnedRange]:
    """Join adjacent ranges with the same owners, for fewer codec calls."""
    runs: list[OwnedRange] = []
    for owned in ranges:
        if runs and runs[-1].ranks == owned.ranks:
            runs[-1] = OwnedRange(runs[-1].start, owned.stop, owned.ranks)
        else:
            runs.append(owned)
    return runs


def cut_ranges(ranges: Iterable[OwnedRange], cuts: Sequence[int]) -> list[OwnedRange]:
    """Cut the ranges at ``cuts``."""
    return [
        OwnedRange(low, high, owned.ranks)
        for owned in ranges
        for low, high in stretches(owned.start, owned.stop, cuts)
    ]


def range_rounds(
    ranges: Sequence[OwnedRange], cuts: Sequence[int], count: int
) -> list[list[OwnedRange]]:
    """Cut ``ranges`` at ``cuts`` and into rounds, each with a part of what every set of owners
    owns.
    """
    rows: dict[tuple[int, ...], list[Range]] = {}
    for owned in cut_ranges(ranges, cuts):
        rows.setdefault(owned.ranks, []).append((owned.start, owned.stop))
    return [
        [OwnedRange(*edges, ranks) for edges, ranks in shares] for shares in _dealt(rows, count)
    ]


def part_rounds(
    ranges: Sequence[OwnedRange], cuts: Sequence[int], world_size: int, count: int
) -> list[list[OwnedPart]]:
    """Cut ``ranges`` at ``cuts`` and chunks, and into rounds.

    Each round has a part of what every source sends to every set of owners.
    """
    rows: dict[tuple[tuple[int, ...], int], list[Range]] = {}
    for part in cut_at_chunks(cut_ranges(ranges, cuts), world_size):
        rows.setdefault((part.ranks, part.source), []).append((part.start, part.stop))
    return [[OwnedPart(*edges, *path) for edges, path in shares] for shares in _dealt(rows, count)]


def _dealt(rows: dict[Key, list[Range]], count: int) -> list[list[tuple[Range, Key]]]:
    """Divide every row over ``count`` rounds; return the ranges of each round, ascending."""
    return [
        sorted(
            ((edges, key) for key, row in zip(rows, shares, strict=True) for edges in row),
            key=itemgetter(0),
        )
        for shares in cut_rows(list(rows.values()), count)
    ]
