"""Which rank sums and which ranks receive what, when the ranges of a bucket have owners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from hybridcomp.collectives.wire.chunks import chunk_ranges

Plan = Literal["direct", "balanced"]


@dataclass(frozen=True)
class OwnedRange:
    """Elements ``[start, stop)`` of a flat tensor and the group ranks that need their sum."""

    start: int
    stop: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
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


def plan_reduction(ranges: Sequence[OwnedRange], world_size: int) -> Plan:
    """How to reduce: by the largest number of elements that any rank must send or receive.

    ``direct``: everyone sends to the owners. ``balanced``: split evenly, sum, send the sums on to
    the owners. One rank that owns a whole bucket would receive ``W - 1`` times its length
    directly, but at most twice its length by the balanced way. Ties are direct: it quantizes once.
    """
    return _plan(tuple(ranges), world_size)


@lru_cache(maxsize=4096)  # buckets come back every step; a plan costs ranges * ranks
def _plan(ranges: tuple[OwnedRange, ...], world_size: int) -> Plan:
    direct = _busiest(_direct_traffic(ranges, world_size))
    numel = max((owned.stop for owned in ranges), default=0)
    first = _busiest(_direct_traffic(even_ranges(numel, world_size), world_size))
    traffic = [[0, 0] for _ in range(world_size)]
    for piece in cut_at_chunks(ranges, world_size):
        for rank in piece.ranks:
            if rank != piece.source:
                traffic[piece.source][0] += piece.numel
                traffic[rank][1] += piece.numel
    return "direct" if direct <= first + _busiest(traffic) else "balanced"


def even_ranges(numel: int, world_size: int) -> list[OwnedRange]:
    """``chunk_ranges`` as ranges."""
    chunks = chunk_ranges(numel, world_size)
    return [OwnedRange(start, stop, (rank,)) for rank, (start, stop) in enumerate(chunks)]


def cut_at_chunks(ranges: Sequence[OwnedRange], world_size: int) -> list[Piece]:
    """The ranges cut at the borders of ``chunk_ranges``, in order."""
    chunks = chunk_ranges(max((owned.stop for owned in ranges), default=0), world_size)
    return [
        Piece(max(low, owned.start), min(high, owned.stop), owned.ranks, source)
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


def merge_neighbours(ranges: Sequence[OwnedRange]) -> list[OwnedRange]:
    """Neighbours with the same owners as one range: fewer calls of the codec."""
    runs: list[OwnedRange] = []
    for owned in ranges:
        if runs and runs[-1].ranks == owned.ranks:
            runs[-1] = OwnedRange(runs[-1].start, owned.stop, owned.ranks)
        else:
            runs.append(owned)
    return runs
