"""Cut a flat tensor into chunks for the ranks of a group, at parameters, and into rounds."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

#: ``[start, stop)`` of a flat tensor
Range = tuple[int, int]

#: chunks start at multiples of this many elements: no codec block of 4, 16 or 32 is cut
CHUNK_ALIGN = 32
#: alignment of cuts between rounds, in elements. With every codec of fixed size, this many values
#: are whole blocks and tiles, and their payload is a multiple of 16 bytes. So the payloads of a
#: tensor that is cut at such positions have the same bytes as the payload of the whole tensor
SEGMENT_ALIGN = 65536


@dataclass(frozen=True)
class OwnedRange:
    """Elements ``[start, stop)`` of a flat tensor and the group ranks that need their sum."""

    start: int
    stop: int
    ranks: tuple[int, ...]


@lru_cache(maxsize=4096)  # cached: every message calls this, and messages have few lengths
def chunk_ranges(numel: int, world_size: int) -> tuple[Range, ...]:
    """Return ``[start, stop)`` of every rank's chunk: the even split that ``all_reduce`` uses.

    Starts are multiples of 32 elements, so later chunks may be shorter, or empty.
    """
    even = -(-numel // world_size)
    size = -(-even // CHUNK_ALIGN) * CHUNK_ALIGN
    return tuple(
        (min(rank * size, numel), min((rank + 1) * size, numel)) for rank in range(world_size)
    )


def stretches(start: int, stop: int, cuts: Sequence[int]) -> list[Range]:
    """Cut ``[start, stop)`` at the ``cuts`` (ascending) that lie inside; [] if it is empty."""
    inside = cuts[bisect_right(cuts, start) : bisect_left(cuts, stop)]
    edges = [start, *inside, stop]
    return [edge for edge in pairwise(edges) if edge[0] < edge[1]]


def cut_rows(rows: Sequence[Sequence[Range]], count: int) -> list[list[list[Range]]]:
    """Cut ``rows`` into ``count`` rounds, each with a part of every row."""
    if count == 1:
        return [[list(row) for row in rows]]
    return [list(shares) for shares in zip(*(_cut(row, count) for row in rows), strict=True)]


def _cut(row: Sequence[Range], count: int) -> list[list[Range]]:
    """Cut ``row`` into ``count`` parts of about the same length; the last ones may be empty.

    Each part begins at a multiple of SEGMENT_ALIGN elements after the start of a slice.
    """
    total = sum(stop - start for start, stop in row)
    parts: list[list[Range]] = [[]]
    done = 0
    for start, stop in row:
        while start < stop:
            while len(parts) < count and done * count >= total * len(parts):
                parts.append([])
            missing = -(-total * len(parts) // count) - done
            step = -(-missing // SEGMENT_ALIGN) * SEGMENT_ALIGN
            end = min(stop, start + step) if len(parts) < count else stop
            parts[-1].append((start, end))
            done += end - start
            start = end
    return parts + [[] for _ in range(count - len(parts))]
