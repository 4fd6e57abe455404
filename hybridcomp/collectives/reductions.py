"""all_reduce and reduce_scatter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_rank, get_world_size

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.fused import adjacent, fused_all_reduce, fused_reduce_scatter
from hybridcomp.collectives.pair_exchange import pair_all_reduce
from hybridcomp.collectives.quantizations import all_reduce_codecs, both_fused
from hybridcomp.collectives.reduce_parts import Part, sum_parts
from hybridcomp.collectives.wire.buffers import POOL
from hybridcomp.collectives.wire.chunks import chunk_ranges, stretches
from hybridcomp.collectives.wire.encoding import (
    check_residual,
    check_values,
    decode_all,
    encode_all,
    sent_dtype,
    settle,
    show_overflow,
)
from hybridcomp.collectives.wire.exchange import gather, gather_room
from hybridcomp.collectives.wire.handle import Handle, ReduceScatterHandle, Steps
from hybridcomp.collectives.wire.meter import Meter
from hybridcomp.collectives.wire.pipelining import Range, overlapped, segments
from hybridcomp.errors import CodecError


def all_reduce(
    tensor: Tensor,
    codec: Codec,
    group: ProcessGroup | None,
    *,
    meter: Meter,
    residual: Tensor | None = None,
    owner_residual: Tensor | None = None,
    cuts: Sequence[int] = (),
    async_op: bool = False,
) -> Handle:
    """Sum ``tensor`` over ``group`` in place; all ranks end with the same bits.

    Two quantizations however many ranks there are. With e1 the codec's bound for one rank's values
    and e2 that for the sum, the error is at most ``(W - 1) * e1 + e2``. A bounded codec splits its
    bound over the two. Between two ranks there is one, and the error at most ``2 * e1``
    (``all_reduce_codecs``).

    Args:
        tensor: 1-D contiguous fp32/bf16/fp16; must not be touched before ``wait()``.
        codec: the same on all ranks.
        group: None is the default group.
        meter: filled in, completely so after ``wait()``.
        residual: fp32, ``tensor.numel()`` elements: error feedback of the first quantization,
            updated in place; 0 afterwards where nothing was quantized (in two hops this rank's
            chunk).
        owner_residual: fp32, as long as this rank's chunk of ``chunk_ranges``: the same for the
            second; only two hops use it. Each is given on all ranks or on none.
        cuts: ascending elements where no codec block may reach across; the same on all ranks.
        async_op: return before the first message has arrived. Asynchronous calls are waited for in
            the same order on all ranks: ``wait()`` posts the second message.

    Raises CodecError on other tensors.
    Source: two-hop all-reduce as in ZeRO++ (Wang et al. 2023, section 3.3).
    """
    tensor = tensor.detach()
    check_values("tensor", tensor)
    check_residual("residual", residual, tensor.numel())
    if owner_residual is not None:
        start, stop = chunk_ranges(tensor.numel(), get_world_size(group))[get_rank(group)]
        check_residual("owner_residual", owner_residual, stop - start)
    steps = _all_reduce(tensor, codec, group, meter, residual, owner_residual, cuts)
    return Handle(steps, meter, async_op)


def _all_reduce(
    tensor: Tensor,
    codec: Codec,
    group: ProcessGroup | None,
    meter: Meter,
    residual: Tensor | None,
    owner_residual: Tensor | None,
    cuts: Sequence[int],
) -> Steps[None]:
    """Between two ranks a pair; else in segments, all of them side by side (``_segment``)."""
    world_size = get_world_size(group)
    if world_size == 1 or tensor.numel() == 0:
        return
    codecs = all_reduce_codecs(codec, tensor.dtype, world_size, tensor.device, cuts)
    meter.use(*(each.spec for each in codecs))
    if len(codecs) == 1:
        yield from pair_all_reduce(tensor, codecs[0], group, meter, residual, cuts)
        return
    fused = both_fused(codecs, tensor.device, cuts)
    if fused is not None:
        yield from fused_all_reduce(tensor, *fused, group, meter, residual, owner_residual)
        return
    first, second = codecs
    me, chunks = get_rank(group), chunk_ranges(tensor.numel(), world_size)
    own = tensor[slice(*chunks[me])]
    scratch, total = _accumulator(own, me, owner_residual)
    whole = _Sum(tensor, own, total, chunks[me][0], residual, owner_residual)
    rows = [stretches(*chunk, cuts) for chunk in chunks]
    yield from overlapped(
        _segment(whole, segment, first, second, group, meter)
        for segment in segments(rows, (first, second), tensor.device, group)
    )
    POOL.give(scratch)


@dataclass(frozen=True)
class _Sum:
    """The tensors of one all_reduce."""

    tensor: Tensor
    own: Tensor  # this rank's chunk of it
    total: Tensor  # fp32: where that chunk is summed
    start: int  # of the chunk in ``tensor``
    residual: Tensor | None
    owner_residual: Tensor | None


def _segment(
    whole: _Sum,
    rows: Sequence[Sequence[Range]],
    first: Codec,
    second: Codec,
    group: ProcessGroup | None,
    meter: Meter,
) -> Steps[None]:
    """1-3 sum my part of the segment (``sum_parts``), 4 encode it, 5 all-gather, 6 decode.

    ``rows``: by rank, the stretches of the tensor that it sums.
    """
    me, tensor = get_rank(group), whole.tensor
    views = [[tensor[low:high] for low, high in row] for row in rows]
    low, high = (rows[me][0][0], rows[me][-1][1]) if rows[me] else (0, 0)
    mine = slice(low - whole.start, high - whole.start) if rows[me] else slice(0, 0)
    total = whole.total[mine]
    # 1-3
    sums = _like(total, views[me])
    in_place = whole.total is whole.own
    parts = _parts(views, rows, whole.residual)
    for part, out in zip((p for p in parts if p.owners == (me,)), sums, strict=True):
        part.out, part.fresh = part.values if in_place else out, whole.owner_residual is None
    yield from sum_parts(parts, first, group, meter)
    # 4
    dtype = sent_dtype(second, tensor.dtype, wide=True)
    numels = [[view.numel() for view in row] for row in views]
    own = gather_room(second, dtype, numels, tensor.device, group)
    with meter.coding():
        show_overflow(total, tensor.dtype)
        encode_all(second, sums, own, dtype)
    # 5
    payloads, gathered = yield from gather(second, dtype, own, numels, group, meter)
    # 6
    with meter.coding():
        decode_all(second, list(chain(*payloads)), list(chain(*views)))
        if whole.owner_residual is not None:
            settle(total, whole.own[mine])
    POOL.give(own.buffer, gathered)


def _parts(
    views: Sequence[Sequence[Tensor]], rows: Sequence[Sequence[Range]], residual: Tensor | None
) -> list[Part]:
    """Parts of all ranks' ``views``, which lie at ``rows``, with their residuals."""
    return [
        Part(view, (rank,), None if residual is None else residual[low:high])
        for rank, (row, ranges) in enumerate(zip(views, rows, strict=True))
        for view, (low, high) in zip(row, ranges, strict=True)
    ]


def _like(flat: Tensor, views: Sequence[Tensor]) -> Sequence[Tensor]:
    """``flat`` cut into stretches as long as ``views``."""
    return torch.split(flat, [view.numel() for view in views])


def _accumulator(
    own: Tensor, me: int, owner_residual: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """``(buffer to give back, fp32 tensor that will hold the sum)``.

    The sum goes where it costs no further pass over memory: on top of the owner's residual, or of
    the own values where that keeps the rank order (see ``Part``).
    """
    if owner_residual is not None:
        return None, owner_residual
    if own.dtype == torch.float32 and me <= 1:
        return None, own
    return POOL.take_fp32(own.numel(), own.device)


def reduce_scatter(
    shards: Sequence[Tensor],
    codec: Codec,
    group: ProcessGroup | None,
    *,
    meter: Meter,
    residuals: Sequence[Tensor] | None = None,
    cuts: Sequence[Sequence[int]] | None = None,
    async_op: bool = False,
) -> ReduceScatterHandle:
    """Sum over ``group`` what every rank destines to this rank.

    The error of an element is at most ``(W - 1) * e1``, with e1 the codec's bound for one rank's
    values: this rank's own values are exact.

    Args:
        shards: one 1-D contiguous tensor per group rank, of one dtype; ``shards[r]`` goes to rank
            r. Lengths may be uneven or 0, but are the same on all ranks. Not modified.
        residuals: fp32, one per shard: error feedback, updated in place; on all ranks or on none.
        cuts: for each shard, ascending elements where no codec block may reach across.
        codec, group, meter, async_op: as for ``all_reduce``.

    Returns a handle whose ``wait()`` gives a new fp32 tensor of ``shards[me].numel()`` elements.
    Raises CodecError on other tensors.
    """
    world_size = get_world_size(group)
    if len(shards) != world_size or len({shard.dtype for shard in shards}) != 1:
        raise CodecError(
            f"reduce_scatter: expected {world_size} shards of one dtype, found "
            f"{[str(shard.dtype) for shard in shards]}"
        )
    if residuals is not None and len(residuals) != world_size:
        raise CodecError(f"residuals: expected {world_size} tensors, found {len(residuals)}")
    for rank, shard in enumerate(shards):
        check_values(f"shards[{rank}]", shard)
        if residuals is not None:
            check_residual(f"residuals[{rank}]", residuals[rank], shard.numel())
    steps = _reduce_scatter([s.detach() for s in shards], codec, group, meter, residuals, cuts)
    return ReduceScatterHandle(steps, meter, async_op)


def _reduce_scatter(
    shards: Sequence[Tensor],
    codec: Codec,
    group: ProcessGroup | None,
    meter: Meter,
    residuals: Sequence[Tensor] | None,
    cuts: Sequence[Sequence[int]] | None,
) -> Steps[Tensor]:
    me = get_rank(group)
    if len(shards) == 1:
        return shards[0].to(torch.float32, copy=True)
    total = shards[me].new_empty(shards[me].numel(), dtype=torch.float32)
    if any(shard.numel() for shard in shards):
        (first,) = codec.hops(1, len(shards), exact=1)
        meter.use(first.spec)
        flat = None if cuts and any(cuts) else adjacent(shards)
        left = None if residuals is None else adjacent(residuals)
        fused = first.fused(total.device) if flat is not None else None
        if flat is not None and fused is not None and (residuals is None or left is not None):
            lengths = [shard.numel() for shard in shards]
            yield from fused_reduce_scatter(flat, lengths, total, first, fused, group, meter, left)
            return total
        rows = [
            stretches(0, shard.numel(), cuts[rank] if cuts else ())
            for rank, shard in enumerate(shards)
        ]
        yield from overlapped(
            sum_parts(_shares(shards, segment, residuals, total, me), first, group, meter)
            for segment in segments(rows, (first,), total.device, group)
        )
    return total


def _shares(
    shards: Sequence[Tensor],
    rows: Sequence[Sequence[Range]],
    residuals: Sequence[Tensor] | None,
    total: Tensor,
    me: int,
) -> list[Part]:
    """Parts of the ``shards`` of all ranks, cut at ``rows``; those of ``me`` go to ``total``."""
    return [
        Part(
            shards[rank][low:high],
            (rank,),
            None if residuals is None else residuals[rank][low:high],
            total[low:high] if rank == me else None,
        )
        for rank, row in enumerate(rows)
        for low, high in row
    ]
