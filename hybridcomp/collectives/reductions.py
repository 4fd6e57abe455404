"""all_reduce and reduce_scatter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_rank, get_world_size

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.buffers import POOL
from hybridcomp.collectives.chunks import chunk_ranges, stretches
from hybridcomp.collectives.exchange import (
    check_residual,
    check_values,
    encode_all,
    gather,
    gather_capacity,
    sent_dtype,
    settle,
    show_overflow,
)
from hybridcomp.collectives.fused import fused_all_reduce
from hybridcomp.collectives.handle import Handle, ReduceScatterHandle, Steps
from hybridcomp.collectives.meter import Meter
from hybridcomp.collectives.summing import Part, sum_parts
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
    bound over the two.

    Args:
        tensor: 1-D contiguous fp32/bf16/fp16; must not be touched before ``wait()``.
        codec: the same on all ranks.
        group: None is the default group.
        meter: filled in, completely so after ``wait()``.
        residual: fp32, ``tensor.numel()`` elements: error feedback of the first quantization,
            updated in place; 0 afterwards where nothing was quantized (this rank's chunk).
        owner_residual: fp32, as long as this rank's chunk of ``chunk_ranges``: the same for the
            second. Each is given on all ranks or on none.
        cuts: ascending elements where no codec block may reach across; the same on all ranks.
        async_op: return before the first message has arrived. Asynchronous calls are waited for in
            the same order on all ranks: ``wait()`` posts the second message.

    Raises CodecError on other tensors.
    Source: two-hop all-reduce as in ZeRO++ (Wang et al. 2023, section 3.3).
    """
    tensor = tensor.detach()
    check_values("tensor", tensor)
    check_residual("residual", residual, tensor.numel())
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
    """1-3 sum my chunk (``sum_parts``), 4 encode it, 5 all-gather, 6 decode everywhere.

    A long message could run these steps for one segment while the next is under way: cut
    ``tensor`` here and interleave the generators.
    """
    me, world_size = get_rank(group), get_world_size(group)
    if world_size == 1 or tensor.numel() == 0:
        return
    first, second = codec.hops(2, world_size, result=tensor.dtype, exact=1)
    meter.use(first.spec, second.spec)
    if first == second and residual is None and owner_residual is None and not cuts:
        fused = first.fused(tensor.device)
        if fused is not None:
            yield from fused_all_reduce(tensor, first, fused, group, meter)
            return
    chunks = chunk_ranges(tensor.numel(), world_size)
    views = [[tensor[a:b] for a, b in stretches(*chunk, cuts)] for chunk in chunks]
    own = tensor[slice(*chunks[me])]
    # 1-3
    scratch, total = _accumulator(own, me, owner_residual)
    sums = _like(total, views[me])
    in_place = total is own
    parts = _parts(views, residual)
    for part, out in zip((p for p in parts if p.owners == (me,)), sums, strict=True):
        part.out, part.fresh = part.values if in_place else out, owner_residual is None
    yield from sum_parts(parts, first, group, meter)
    # 4
    dtype = sent_dtype(second, tensor.dtype, wide=True)
    numels = [[view.numel() for view in row] for row in views]
    payload = POOL.take(gather_capacity(second, dtype, numels), tensor.device)
    with meter.coding():
        show_overflow(total, tensor.dtype)
        used = encode_all(second, sums, payload, dtype)
    # 5
    payloads, gathered = yield from gather(second, dtype, payload, used, numels, group, meter)
    # 6
    with meter.coding():
        for row, encoded in zip(views, payloads, strict=True):
            for view, one in zip(row, encoded, strict=True):
                second.decode(one, view)
        if owner_residual is not None:
            settle(owner_residual, own)
    POOL.give(scratch, payload, gathered)


def _parts(views: Sequence[Sequence[Tensor]], residual: Tensor | None) -> list[Part]:
    """Parts of all ranks' ``views``, which follow each other in memory, with their residuals."""
    flat = [(view, rank) for rank, row in enumerate(views) for view in row]
    stay = [None] * len(flat) if residual is None else _like(residual, [view for view, _ in flat])
    return [Part(view, (rank,), left) for (view, rank), left in zip(flat, stay, strict=True)]


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
        parts: list[Part] = []
        for rank, shard in enumerate(shards):
            for low, high in stretches(0, shard.numel(), cuts[rank] if cuts else ()):
                left = None if residuals is None else residuals[rank][low:high]
                out = total[low:high] if rank == me else None
                parts.append(Part(shard[low:high], (rank,), left, out))
        yield from sum_parts(parts, first, group, meter)
    return total
