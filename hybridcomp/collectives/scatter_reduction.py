"""reduce_scatter of encoded shards: each rank gets the fp32 sum of its shard over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from hybridcomp.codecs.quantized_residual import Residual, as_fp32, joined
from hybridcomp.collectives.fused import adjacent, fused_reduce_scatter
from hybridcomp.collectives.hierarchical.intra_node import join_columns, node_sum
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


class Shards(Sequence[Tensor]):
    """A flat tensor as shards, one for each rank, that nobody cuts until asked.

    Attributes:
        flat: 1-D and contiguous.
        numel: elements of a shard; the last one may be shorter.
    """

    def __init__(self, flat: Tensor, numel: int) -> None:
        self.flat, self.numel = flat, numel

    def __len__(self) -> int:
        return -(-self.flat.numel() // self.numel) if self.numel else 0

    @overload
    def __getitem__(self, rank: int) -> Tensor: ...

    @overload
    def __getitem__(self, rank: slice) -> list[Tensor]: ...

    def __getitem__(self, rank: int | slice) -> Tensor | list[Tensor]:
        if isinstance(rank, slice):
            return [self[each] for each in range(*rank.indices(len(self)))]
        place = range(len(self))[rank] * self.numel
        return self.flat[place : place + self.numel]


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
            r. Lengths may be uneven or 0, but are the same on all ranks. Not modified. With
            ``Shards`` the host's time does not grow with the group.
        how: codec, group, meter and probe; its residuals and cuts are not used.
        residuals: fp32, as long as the shards of ``group.receivers``: error feedback, updated in
            place; on all ranks or on none.
        cuts: for each of these shards, ascending positions that no codec block may cross.
        async_op: as for ``all_reduce``.

    Returns a handle whose ``wait()`` gives a new fp32 tensor of ``shards[me].numel()`` elements.
    Raises CodecError on other tensors.
    """
    flat = _checked(shards, how.group.size)
    steps = _flat if how.group.levels is None else _in_two_levels
    return ReduceScatterHandle(steps(flat, how, residuals, cuts), how.meter, async_op)


def _checked(shards: Sequence[Tensor], ranks: int) -> Sequence[Tensor]:
    """Return the shards without their graph. Raises CodecError on other tensors."""
    dtypes = {shard.dtype for shard in (shards[:1] if isinstance(shards, Shards) else shards)}
    if len(shards) != ranks or len(dtypes) != 1:
        raise CodecError(
            f"reduce_scatter: expected {ranks} shards of one dtype, found "
            f"{[str(shard.dtype) for shard in shards]}"
        )
    if isinstance(shards, Shards):
        check_values("shards", shards.flat)
        return Shards(shards.flat.detach(), shards.numel) if shards.flat.requires_grad else shards
    for rank, shard in enumerate(shards):
        check_values("shards", shard, rank)
    return [shard.detach() if shard.requires_grad else shard for shard in shards]


def _in_two_levels(
    shards: Sequence[Tensor], how: Reduction, residuals: Residuals, cuts: Cuts
) -> Steps[Tensor]:
    """1 sum the shards of this rank's grid column over the node, 2 reduce-scatter between nodes."""
    levels = how.group.levels
    assert levels is not None
    codec = how.codec.for_presummed(levels.width)
    # 1
    values, lengths, column = join_columns(
        shards, _joined(shards) if levels.is_regular else None, levels
    )
    if not values.numel():
        return values.to(torch.float32)
    buffer, work = yield from node_sum(values, lengths, codec, how)
    if how.probe is not None:
        how.probe(work, (), None if residuals is None else torch.cat(list(map(as_fp32, residuals))))
    # 2
    is_even = column[0] > 0 and len(set(column)) == 1
    mine = Shards(work, column[0]) if is_even else torch.split(work, column)
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
        is_one = isinstance(shards, Shards)
        longest = 0 if is_one else max(range(len(shards)), key=lambda rank: shards[rank].numel())
        held = None if residuals is None else residuals[longest]
        how.probe(shards[longest], cuts[longest] if cuts else (), held)
    if len(shards) == 1:
        alone = shards[0].to(torch.float32, copy=True)
        if residuals is not None:
            add_alone(residuals[0], alone)
        return given(alone)
    own = shards[me]
    total = own.new_empty(own.numel(), dtype=torch.float32)
    if not own.numel() and not any(shard.numel() for shard in shards):
        return given(total)
    (codec,) = how.codec.split_error_budget(1, len(shards), exact=1)
    how.meter.use(codec.spec)
    fused = None if cuts and any(cuts) else codec.fused(total.device)
    flat = None if fused is None else _joined(shards)
    left = None if flat is None or residuals is None else _joined_residuals(residuals)
    if fused is not None and flat is not None and (residuals is None or left is not None):
        only = Reduction(codec, how.group, how.meter, residual=left)
        return fused_reduce_scatter(flat, shards[0].numel(), total, fused, only)
    hop = Transfer(codec, how.group, how.meter, flush=how.flush)
    return _in_rounds(shards, total, residuals, cuts, hop)


def _joined(shards: Sequence[Tensor]) -> Tensor | None:
    """Return the shards as one tensor if they are one in memory, else None."""
    return shards.flat if isinstance(shards, Shards) else adjacent(shards)


def _joined_residuals(residuals: Sequence[Residual]) -> Residual | None:
    """Return residuals as one if they are one in memory, those of few bits with gaps; else None."""
    if isinstance(residuals, Shards):
        return residuals.flat
    wide = [one for one in residuals if isinstance(one, Tensor)]
    return adjacent(wide) if wide else joined(residuals)


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
    if isinstance(residuals, Shards) and isinstance(shards, Shards):
        check_residual("residuals", residuals.flat, shards.flat.numel())
        return
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
