"""Which rank sums and which ranks receive what, when the ranges of a bucket have owners.

Buckets come back every step, so what follows from their ranges alone is worked out once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeVar

from hybridcomp.collectives.wire import OwnedRange, Range, chunk_ranges, cut_rows, stretches
from hybridcomp.errors import CodecError

PlanKind = Literal["direct", "balanced"]
Key = TypeVar("Key")


@dataclass(frozen=True)
class OwnedPart:
    """The part of one range inside one chunk, in the second hop of the balanced plan."""

    start: int
    stop: int
    ranks: tuple[int, ...]
    source: int  # group rank that has summed it

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def stays(self) -> bool:
        """Whether it is needed only where it was summed: no second quantization."""
        return self.ranks == (self.source,)


@dataclass(frozen=True)
class OwnerPlan:
    """How the ranges of one bucket are reduced.

    Attributes:
        kind: ``direct``, everyone sends to the owners, or ``balanced``: split evenly, sum, send the
            sums on to the owners.
        numel: elements of the bucket.
        runs: neighbours with the same owners as one range, empty ones left out.
        even: the chunks of the ranks, as ranges.
        longest: elements of the longest row of a message: what one set of owners owns, a chunk,
            what one rank sends on to one set of owners.
    """

    kind: PlanKind
    numel: int
    runs: tuple[OwnedRange, ...]
    even: tuple[OwnedRange, ...]
    longest: tuple[int, int, int]


@lru_cache(maxsize=4096)
def plan_of(ranges: tuple[OwnedRange, ...], world_size: int) -> OwnerPlan:
    """The plan for ``ranges``, the same on all ranks.

    The rule is the largest number of elements that any rank must send or receive. One rank that
    owns a whole bucket would receive ``W - 1`` times its length directly, but at most twice its
    length by the balanced way. Ties are direct: it quantizes once.

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
    runs = merge_neighbours([owned for owned in ranges if owned.start < owned.stop])
    parts = cut_at_chunks(runs, world_size)
    return OwnerPlan(
        "direct" if direct <= balanced else "balanced",
        numel,
        tuple(runs),
        tuple(even),
        (
            _longest([(run.ranks, run.stop - run.start) for run in runs]),
            max(owned.stop - owned.start for owned in even),
            _longest([((part.source, part.ranks), part.numel) for part in parts]),
        ),
    )


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
    """``chunk_ranges`` as ranges."""
    chunks = chunk_ranges(numel, world_size)
    return [OwnedRange(start, stop, (rank,)) for rank, (start, stop) in enumerate(chunks)]


def cut_at_chunks(ranges: Sequence[OwnedRange], world_size: int) -> list[OwnedPart]:
    """The ranges cut at the borders of ``chunk_ranges``, in order."""
    chunks = chunk_ranges(max((owned.stop for owned in ranges), default=0), world_size)
    return [
        OwnedPart(max(low, owned.start), min(high, owned.stop), owned.ranks, source)
        for owned in ranges
        for source, (low, high) in enumerate(chunks)
        if max(low, owned.start) < min(high, owned.stop)
    ]


def _direct_traffic(ranges: Sequence[OwnedRange], world_size: int) -> list[list[int]]:
    """``[sent, received]`` elements of every rank when all send to the owners."""
    traffic = [[0, 0] for _ in range(world_size)]
    for owned in ranges:
        numel = owned.stop - owned.start
        for rank in range(world_size):
            traffic[rank][0] += numel * sum(owner != rank for owner in owned.ranks)
            traffic[rank][1] += numel * (world_size - 1) * (rank in owned.ranks)
    return traffic


def _busiest(traffic: Sequence[Sequence[int]]) -> int:
    return max(max(row) for row in traffic)


def _longest(lengths: Sequence[tuple[Key, int]]) -> int:
    totals: dict[Key, int] = {}
    for key, numel in lengths:
        totals[key] = totals.get(key, 0) + numel
    return max(totals.values(), default=0)


def merge_neighbours(ranges: Sequence[OwnedRange]) -> list[OwnedRange]:
    """Neighbours with the same owners as one range: fewer calls of the codec."""
    runs: list[OwnedRange] = []
    for owned in ranges:
        if runs and runs[-1].ranks == owned.ranks:
            runs[-1] = OwnedRange(runs[-1].start, owned.stop, owned.ranks)
        else:
            runs.append(owned)
    return runs


@lru_cache(maxsize=4096)
def range_rounds(
    ranges: tuple[OwnedRange, ...], cuts: tuple[int, ...], count: int
) -> list[list[OwnedRange]]:
    """``ranges`` cut at ``cuts`` and into rounds, in which every owner has its share."""
    rows: dict[tuple[int, ...], list[Range]] = {}
    for owned in ranges:
        rows.setdefault(owned.ranks, []).extend(stretches(owned.start, owned.stop, cuts))
    return [
        sorted(
            (OwnedRange(*edges, ranks) for ranks, row in zip(rows, shares, strict=True)
             for edges in row),
            key=lambda owned: owned.start,
        )
        for shares in cut_rows(list(rows.values()), count)
    ]  # fmt: skip


@lru_cache(maxsize=4096)
def part_rounds(
    ranges: tuple[OwnedRange, ...], cuts: tuple[int, ...], world_size: int, count: int
) -> list[list[OwnedPart]]:
    """The parts of ``ranges``, cut at ``cuts``, in rounds with a share of every path from a
    source to its owners."""
    rows: dict[tuple[int, tuple[int, ...]], list[Range]] = {}
    cut = [
        OwnedRange(low, high, owned.ranks)
        for owned in ranges
        for low, high in stretches(owned.start, owned.stop, cuts)
    ]
    for part in cut_at_chunks(cut, world_size):
        rows.setdefault((part.source, part.ranks), []).append((part.start, part.stop))
    return [
        sorted(
            (OwnedPart(*edges, ranks, source)
             for (source, ranks), row in zip(rows, shares, strict=True) for edges in row),
            key=lambda part: part.start,
        )
        for shares in cut_rows(list(rows.values()), count)
    ]  # fmt: skip
