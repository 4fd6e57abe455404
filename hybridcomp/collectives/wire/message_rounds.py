"""Cut long messages into rounds, so that coding one overlaps with sending the others.

A row is the list of slices that a rank sends or sums. The rows of all ranks are cut into equally
many rounds, each with a part of every row, so that all links stay busy. The cuts depend only on the
rows, which all ranks know, and lie between blocks of the codec. So values and residuals equal those
of the uncut message; with a codec of fixed size the bytes do, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.wire import payload_sizes
from hybridcomp.collectives.wire.chunking import SEGMENT_ALIGN, Range, cut_rows
from hybridcomp.collectives.wire.group import Group

#: Elements of the longest row in one round; least elements per round if a row is only halved. One
#: message alone leaves the link idle between its hops, but every round costs half a millisecond.
#: (native time / byte ratio) / time of an all-reduce of fp32, two ranks at 1 Gb/s, load 1.5
#: (``scripts/bench/bench_netlab.py --rounds --megabytes N`` at commit fe690ca):
#:
#:                   64 Ki  128 Ki  256 Ki  512 Ki    1 Mi    2 Mi    4 Mi   whole
#:     64 MB  8 bits   0.86    0.89   0.93    0.96    0.96    0.95    0.94    0.85
#:            4 bits   0.48    0.78   0.81    0.90    0.91    0.96    0.86    0.76
#:     16 MB  8 bits   0.63    0.77   0.85    0.92    0.91                    0.80
#:            4 bits   0.34    0.50   0.74    0.78    0.78                    0.69
#:     4 MB   8 bits   0.52    0.69   0.69                                    0.74
#:            4 bits   0.33    0.34   0.59                                    0.56
ROUND, HALF = 1 << 20, 1 << 18


def round_count(longest: int, codecs: Sequence[Codec], device: torch.device, group: Group) -> int:
    """Return the number of rounds of a message; 1 for short messages, which are faster uncut.

    ``longest``: elements of its longest row; ``codecs``: codecs that encode the rows. On GPUs
    messages stay uncut, since a launch costs more than coding a round.
    """
    if longest < 2 * HALF or device.type != "cpu":
        return 1
    scale = max(codec.round_scale for codec in codecs)
    count = max(longest // (scale * ROUND), 2 if longest >= 2 * scale * HALF else 1)
    if count == 1:
        return 1
    return count if all(_may_be_cut(codec, device, group) for codec in codecs) else 1


def rounds(
    rows: Sequence[Sequence[Range]], codecs: Sequence[Codec], device: torch.device, group: Group
) -> list[list[list[Range]]]:
    """Cut ``rows`` into rounds, each with a part of every row; into one if that is faster."""
    longest = max(sum(stop - start for start, stop in row) for row in rows)
    return cut_rows(rows, round_count(longest, codecs, device, group))


def _may_be_cut(codec: Codec, device: torch.device, group: Group) -> bool:
    """Return whether rounds give the same result and need no extra messages for payload sizes."""
    if codec.fixed_size:
        return True
    return SEGMENT_ALIGN % codec.segment == 0 and payload_sizes.in_front(codec, device, group)
