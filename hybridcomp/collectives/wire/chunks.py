"""How a flat tensor is cut for the ranks of a group."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

#: chunks start at multiples of this many elements: no codec block of 4, 16 or 32 is cut
CHUNK_ALIGN = 32


def chunk_ranges(numel: int, world_size: int) -> list[tuple[int, int]]:
    """``[start, stop)`` of the chunk of every rank: the even split that ``all_reduce`` uses.

    Starts are multiples of 32 elements, so later chunks may be shorter, or empty.
    """
    even = -(-numel // world_size)
    size = -(-even // CHUNK_ALIGN) * CHUNK_ALIGN
    return [(min(rank * size, numel), min((rank + 1) * size, numel)) for rank in range(world_size)]


def stretches(start: int, stop: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """``[start, stop)`` cut at those of ``cuts`` (ascending) that lie inside; empty when it is."""
    inside = cuts[bisect_right(cuts, start) : bisect_left(cuts, stop)]
    edges = [start, *inside, stop]
    return [edge for edge in pairwise(edges) if edge[0] < edge[1]]
