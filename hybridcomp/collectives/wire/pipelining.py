"""Long messages in segments, so that coding one overlaps with the wire of the others.

What a rank sends or sums is a row of stretches, as everywhere in this package. The rows of all
ranks are cut into equally many segments, each with its share of every row, so that all links stay
busy. Where the cuts lie depends on the rows alone, which all ranks know, and is where no codec
notices: bits and residuals are those of the whole message, bytes too if the codec is of fixed size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch.distributed import ProcessGroup, Work

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.wire import payload_sizes
from hybridcomp.collectives.wire.handle import Steps

#: ``[start, stop)`` of a flat tensor
Range = tuple[int, int]

#: Elements. A payload of a multiple of it is a multiple of 16 bytes, and consists of whole blocks
#: and tiles, for every codec of fixed size: payloads of both sides of a cut are that of the whole.
ALIGN = 65536
#: Elements of the longest row in one segment, and of half a row where that is less: one message
#: alone leaves the link idle between its hops, and each costs half a millisecond of its own.
#: (native time / byte ratio) / time of an all-reduce of fp32, two ranks at 1 Gb/s, load 1.5
#: (``scripts/bench/bench_netlab.py --segments --megabytes N``):
#:
#:                   64 Ki  128 Ki  256 Ki  512 Ki    1 Mi    2 Mi    4 Mi   whole
#:     64 MB  8 bits   0.86    0.89   0.93    0.96    0.96    0.95    0.94    0.85
#:            4 bits   0.48    0.78   0.81    0.90    0.91    0.96    0.86    0.76
#:     16 MB  8 bits   0.63    0.77   0.85    0.92    0.91                    0.80
#:            4 bits   0.34    0.50   0.74    0.78    0.78                    0.69
#:     4 MB   8 bits   0.52    0.69   0.69                                    0.74
#:            4 bits   0.33    0.34   0.59                                    0.56
SEGMENT, HALF = 1 << 20, 1 << 18


def segments(
    rows: Sequence[Sequence[Range]],
    codecs: Sequence[Codec],
    device: torch.device,
    group: ProcessGroup | None,
) -> list[list[list[Range]]]:
    """``rows`` cut into segments, each with its share of every row; just one if that is better.

    ``codecs``: all that the rows go through. GPUs keep messages whole, as a launch costs more than
    coding a segment.
    """
    longest = max(sum(stop - start for start, stop in row) for row in rows)
    count = max(longest // SEGMENT, 2 if longest >= 2 * HALF else 1)
    if (
        count == 1
        or device.type != "cpu"
        or not all(_may_be_cut(codec, device, group) for codec in codecs)
    ):
        return [[list(row) for row in rows]]
    cut = [_cut(row, count) for row in rows]
    return [list(shares) for shares in zip(*cut, strict=True)]


def _may_be_cut(codec: Codec, device: torch.device, group: ProcessGroup | None) -> bool:
    """Whether results stay what they are, and no segment waits for a message with its sizes."""
    if codec.fixed_size:
        return True
    return ALIGN % codec.segment == 0 and payload_sizes.in_front(codec, device, group)


def _cut(row: Sequence[Range], count: int) -> list[list[Range]]:
    """``row`` in ``count`` parts of about the same length; late ones may be empty.

    Parts begin with a stretch or a multiple of ALIGN behind the start of one.
    """
    total = sum(stop - start for start, stop in row)
    parts: list[list[Range]] = [[]]
    done = 0
    for start, stop in row:
        while start < stop:
            while len(parts) < count and done * count >= total * len(parts):
                parts.append([])
            missing = -(-total * len(parts) // count) - done
            step = -(-missing // ALIGN) * ALIGN if len(parts) < count else stop - start
            end = min(stop, start + step)
            parts[-1].append((start, end))
            done += end - start
            start = end
    return parts + [[] for _ in range(count - len(parts))]


def overlapped(messages: Iterable[Steps[None]]) -> Steps[None]:
    """Run collectives side by side: start all, then go on with each as its message arrives.

    The order depends on nothing but their number, so all ranks post the same messages in the same
    order. Started at once, all of a first hop is under way when a handle is returned.
    """
    waiting: deque[tuple[Steps[None], Work]] = deque()

    def advance(steps: Steps[None]) -> None:
        for work in steps:
            waiting.append((steps, work))
            return

    for steps in messages:
        advance(steps)
    while waiting:
        steps, work = waiting.popleft()
        yield work
        advance(steps)
