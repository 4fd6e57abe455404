"""all_reduce between two ranks: each sends all of its values to the other.

As many bytes as in two hops, in which each sends half of its values and then half of the sums. But
values are encoded once, so that a relative bound leaves each encoding twice the error and codecs
of a fixed size two thirds of the squared error; and one message is waited for instead of two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_rank

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.wire.buffers import POOL
from hybridcomp.collectives.wire.chunks import stretches
from hybridcomp.collectives.wire.encoding import Job, sent_dtype
from hybridcomp.collectives.wire.exchange import exchange
from hybridcomp.collectives.wire.handle import Steps
from hybridcomp.collectives.wire.meter import Meter
from hybridcomp.collectives.wire.pipelining import Range, overlapped, segments


def pair_all_reduce(
    tensor: Tensor,
    codec: Codec,
    group: ProcessGroup | None,
    meter: Meter,
    residual: Tensor | None,
    cuts: Sequence[int],
) -> Steps[None]:
    """Sum ``tensor`` over the two ranks of ``group`` in place; both get the same bits.

    The arguments are those of ``all_reduce``; nobody encodes a sum, so no owner has a residual.
    """
    rows = [stretches(0, tensor.numel(), cuts)]
    yield from overlapped(
        _segment(tensor, row, codec, group, meter, residual)
        for (row,) in segments(rows, (codec,), tensor.device, group)
    )


def _segment(
    tensor: Tensor,
    row: Sequence[Range],
    codec: Codec,
    group: ProcessGroup | None,
    meter: Meter,
    residual: Tensor | None,
) -> Steps[None]:
    """1 encode and decode my values, 2 exchange, 3 add the other's to mine.

    Both add what both have decoded, and a + b is b + a.
    """
    me, start, stop = get_rank(group), row[0][0], row[-1][1]
    dtype = sent_dtype(codec, tensor.dtype, wide=residual is not None)
    # 1
    buffer, total = None, tensor[start:stop]
    if tensor.dtype != torch.float32:
        buffer, total = POOL.take_fp32(stop - start, tensor.device)
    sums = [total[low - start : high - start] for low, high in row]
    left = [None if residual is None else residual[low:high] for low, high in row]
    values = [tensor[low:high] for low, high in row]
    jobs = [Job(*each) for each in zip(values, left, sums, strict=True)]
    # 2
    numels = [high - low for low, high in row]
    to = [jobs if rank != me else [] for rank in range(2)]
    come = [numels if rank != me else [] for rank in range(2)]
    payloads = yield from exchange(codec, dtype, to, come, tensor.device, group, meter)
    # 3
    with meter.coding():
        for payload, out in zip(payloads.received[1 - me], sums, strict=True):
            codec.decode_add(payload, out, dtype)
        if buffer is not None:
            tensor[start:stop].copy_(total)
    payloads.release()
    POOL.give(buffer)
