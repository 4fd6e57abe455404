"""reduce_scatter of encoded shards: each rank gets the fp32 sum of its shard over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridcomp.codecs.quantized_residual import Residual, as_fp32
from hybridcomp.collectives.fused import adjacent, fused_reduce_scatter
from hybridcomp.collectives.hierarchical.intra_node import node_sum
from hybridcomp.collectives.reduce_parts import ReducedPart, sum_parts
from hybridcomp.collectives.wire import (
    POOL,
    Range,
    ReduceScatterHandle,
    Reduction,
    Steps,
    Transfer,
    add_alone,
    check_residual,
    check_values,
    given,
    overlapped,
    rounds,
    stretches,
)
from hybridcomp.errors import CodecError

#: one for each shard that this rank encodes (``Group.receivers``)
Residuals = Sequence[Residual] | None
Cuts = Sequence[Sequence[int]] | None


def reduce_scatter(
    shards: Sequence[Tensor],
    how: Reduction,
    residuals: Residuals = None,
    cuts: Cuts = None,
    async_op: bool = False,
) -> ReduceScatterHandle:
    """Sum this rank's shard over a group.

    The error of an element is at most ``(W - 1) * e1``, with e1 the codec's bound for one rank's
    values: this rank adds its values exactly. In two levels nodes take the place of ranks.

    Args:
        shards: one 1-D contiguous tensor per group rank, of one dtype; ``shards[r]`` goes to rank
            r. Lengths may be uneven or 0, but are the same on all ranks. Not modified.
        how: codec, group, meter and probe; its residuals and cuts are not used.
        residuals: fp32, as long as the shards of ``group.receivers``: error feedback, updated in
            place; on all ranks or on none.
        cuts: for each of these shards, ascending positions that no codec block may cross.
        async_op: as for ``all_reduce``.

    Returns a handle whose ``wait()`` gives a new fp32 tensor of ``shards[me].numel()`` elements.
    Raises CodecError on other tensors.
    """
    group = how.group
    if len(shards) != group.size or len({shard.dtype for shard in shards}) != 1:
        raise CodecError(
            f"reduce_scatter: expected {group.size} shards of one dtype, found "
            f"{[str(shard.dtype) for shard in shards]}"
        )
    for rank, shard in enumerate(shards):
        check_values("shards", shard, rank)
    flat = [shard.detach() if shard.requires_grad else shard for shard in shards]
    steps = _flat if group.levels is None else _in_two_levels
    return ReduceScatterHandle(steps(flat, how, residuals, cuts), how.meter, async_op)


def _in_two_levels(
    shards: Sequence[Tensor], how: Reduction, residuals: Residuals, cuts: Cuts
) -> Steps[Tensor]:
    """1 sum the shards of this rank's grid column over the node, 2 reduce-scatter between nodes."""
    levels = how.group.levels
    assert levels is not None
    codec = how.codec.for_presummed(levels.width)
    columns = [[row[column] for row in levels.grid] for column in range(levels.width)]
    lengths = [sum(shards[rank].numel() for rank in column) for column in columns]
    # 1
    values = torch.cat([shards[rank] for column in columns for rank in column])
    if not values.numel():
        return values.to(torch.float32)
    buffer, work = yield from node_sum(values, lengths, codec, how)
    if how.probe is not None:
        how.probe(work, (), None if residuals is None else torch.cat(list(map(as_fp32, residuals))))
    # 2
    mine = torch.split(work, [shards[rank].numel() for rank in columns[levels.local]])
    between = Reduction(codec, levels.outer, how.meter, flush=how.flush)
    result = yield from _flat(mine, between, residuals, cuts)
    POOL.give(buffer)
    return result


def _flat(
    shards: Sequence[Tensor], how: Reduction, residuals: Residuals, cuts: Cuts
) -> Steps[Tensor]:
    """Reduce-scatter on one level: in two launches, or in rounds that overlap."""
    me = how.group.rank
    if residuals is not None:
        _check_residuals(shards, residuals)
    if how.probe is not None and len(shards) > 1:
        longest = max(range(len(shards)), key=lambda rank: shards[rank].numel())
        held = None if residuals is None else residuals[longest]
        how.probe(shards[longest], cuts[longest] if cuts else (), held)
    if len(shards) == 1:
        alone = shards[0].to(torch.float32, copy=True)
        if residuals is not None:
            add_alone(residuals[0], alone)
        return given(alone)
    lengths = tuple(shard.numel() for shard in shards)
    total = shards[me].new_empty(lengths[me], dtype=torch.float32)
    if not any(lengths):
        return given(total)
    (codec,) = how.codec.split_error_budget(1, len(shards), exact=1)
    how.meter.use(codec.spec)
    fused = None if cuts and any(cuts) else codec.fused(total.device)
    flat = None if fused is None else adjacent(shards)
    left = None
    if flat is not None and residuals is not None:  # kernels of collectives have fp32 residuals
        wide = [one for one in residuals if isinstance(one, Tensor)]
        left = adjacent(wide) if wide else None
    if fused is not None and flat is not None and (residuals is None or left is not None):
        only = Reduction(codec, how.group, how.meter, residual=left)
        return fused_reduce_scatter(flat, lengths, total, fused, only)
    hop = Transfer(codec, how.group, how.meter, flush=how.flush)
    return _in_rounds(shards, total, residuals, cuts, hop)


def _in_rounds(
    shards: Sequence[Tensor], total: Tensor, residuals: Residuals, cuts: Cuts, via: Transfer
) -> Steps[Tensor]:
    """Sum this rank's shard into ``total``, in rounds that overlap (``sum_parts``)."""
    group = via.group
    rows = [
        stretches(0, shard.numel(), cuts[rank] if cuts else ()) for rank, shard in enumerate(shards)
    ]
    yield from overlapped(
        sum_parts(_parts(shards, share, residuals, total, group.rank), via)
        for share in rounds(rows, (via.codec,), total.device, group)
    )
    return total


def _check_residuals(shards: Sequence[Tensor], residuals: Sequence[Residual]) -> None:
    if len(residuals) != len(shards):
        raise CodecError(f"residuals: expected {len(shards)} tensors, found {len(residuals)}")
    for rank, (shard, residual) in enumerate(zip(shards, residuals, strict=True)):
        check_residual(f"residuals[{rank}]", residual, shard.numel())


def _parts(
    shards: Sequence[Tensor],
    rows: Sequence[Sequence[Range]],
    residuals: Residuals,
    total: Tensor,
    me: int,
) -> list[ReducedPart]:
    """Cut the ``shards`` of all ranks into parts at ``rows``; ``me`` sums its own in ``total``."""
    return [
        ReducedPart(
            shards[rank][low:high],
            (rank,),
            None if residuals is None else residuals[rank][low:high],
            total[low:high] if rank == me else None,
        )
        for rank, row in enumerate(rows)
        for low, high in row
    ]
