"""reduce_scatter of encoded shards: each rank gets the fp32 sum of its shard over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from hybridcomp.codecs.quantized_residual import BLOCK, Residual, as_fp32
from hybridcomp.codecs.residual_runs import joined
from hybridcomp.collectives.fused import adjacent, fused_reduce_scatter
from hybridcomp.collectives.hierarchical.intra_node import join_columns, keep_sum, node_sum
from hybridcomp.collectives.owner_exchange import scatter_parts, shards_as_plan
from hybridcomp.collectives.scatter_plan import ReduceScatterPlan, plan_rounds
from hybridcomp.collectives.wire import (
    POOL,
    ReduceScatterHandle,
    Reduction,
    Steps,
    Transfer,
    add_alone,
    check_residual,
    check_values,
    given,
    overlapped,
    sent_dtype,
    sum_parts,
)
from hybridcomp.errors import CodecError


class Shards(Sequence[Tensor]):
    """A flat tensor as shards, one for each rank, sliced only on access.

    Attributes:
        flat: 1-D and contiguous.
        numel: elements of a shard; the last one may be shorter.
        ranks: number of shards.
        shape: nodes and ranks per node where ``flat`` has equal shards as ``node_sum`` takes them:
            by local index, then by node; empty: by group rank.
    """

    def __init__(self, flat: Tensor, numel: int, shape: tuple[int, ...] = ()) -> None:
        self.flat, self.numel, self.shape = flat, numel, shape
        self.ranks = -(-flat.numel() // numel) if numel else 0

    def __len__(self) -> int:
        return self.ranks

    @overload
    def __getitem__(self, rank: int) -> Tensor: ...

    @overload
    def __getitem__(self, rank: slice) -> list[Tensor]: ...

    def __getitem__(self, rank: int | slice) -> Tensor | list[Tensor]:
        if isinstance(rank, slice):
            return [self[each] for each in range(*rank.indices(self.ranks))]
        place = range(self.ranks)[rank]
        if self.shape:
            nodes, width = self.shape
            place = place % width * nodes + place // width
        place *= self.numel
        return self.flat[place : place + self.numel]


#: one residual for each shard that this rank encodes (``Group.receivers``)
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


def keep_shards(
    shards: Sequence[Tensor], how: Transfer, total: Tensor, async_op: bool = False
) -> ReduceScatterHandle:
    """Sum over the node the shards of this rank's column and add them to ``total``, fp32.

    A later ``reduce_scatter`` of equally long shards sends it by ``Reduction.kept``. ``total``: as
    long as the shards of ``group.receivers``. Returns a handle whose ``wait()`` gives zeros in
    place of a sum.
    """
    steps = _keep(_checked(shards, how.group.size), how, total)
    return ReduceScatterHandle(steps, how.meter, async_op)


def _keep(shards: Sequence[Tensor], how: Transfer, total: Tensor) -> Steps[Tensor]:
    levels = how.group.levels
    assert levels is not None
    flat = _joined(shards) if levels.shape else None
    values, lengths, _ = join_columns(shards, flat, levels)
    if values.numel():
        yield from keep_sum(values, lengths, how, total)
    return total.new_zeros(_sizes(shards, how.group.rank)[1])


def _checked(shards: Sequence[Tensor], ranks: int) -> Sequence[Tensor]:
    """Return the shards detached from autograd. Raises CodecError on other tensors."""
    if isinstance(shards, Shards):
        count, kinds = shards.ranks, min(1, shards.ranks)
    else:
        count, kinds = len(shards), len({shard.dtype for shard in shards})
    if count != ranks or kinds != 1:
        raise CodecError(
            f"reduce_scatter: expected {ranks} shards of one dtype, found "
            f"{[str(shard.dtype) for shard in shards]}"
        )
    if isinstance(shards, Shards):
        check_values("shards", shards.flat)
        if not shards.flat.requires_grad:
            return shards
        return Shards(shards.flat.detach(), shards.numel, shards.shape)
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
    if isinstance(shards, Shards) and shards.shape:
        values, column = shards.flat, shards.numel
        lengths = [levels.nodes * column] * levels.width
    else:
        joined = _joined(shards) if levels.shape else None
        values, lengths, column = join_columns(shards, joined, levels)
    if not values.numel():
        return values.to(torch.float32)
    buffer, work = yield from node_sum(values, lengths, codec, how)
    if how.probe is not None:
        how.probe(work, (), None if residuals is None else torch.cat(list(map(as_fp32, residuals))))
    # 2
    mine = Shards(work, column) if isinstance(column, int) else torch.split(work, column)
    between = Reduction(codec, levels.outer, how.meter, flush=how.flush)
    result = yield from _flat(mine, between, residuals, cuts)
    POOL.give(buffer)
    return result


def _flat(
    shards: Sequence[Tensor], how: Reduction, residuals: Residuals, cuts: Cuts
) -> Steps[Tensor]:
    """Reduce-scatter on one level: in two launches, or in overlapping rounds."""
    me, ranks = how.group.rank, how.group.size
    if isinstance(residuals, Shards) and isinstance(shards, Shards) and residuals.ranks == ranks:
        check_residual("residuals", residuals.flat, shards.flat.numel())
    elif residuals is not None:
        _check_residuals(shards, residuals)
    if how.probe is not None and ranks > 1:
        is_one = isinstance(shards, Shards)
        longest = 0 if is_one else max(range(len(shards)), key=lambda rank: shards[rank].numel())
        held = None if residuals is None else residuals[longest]
        how.probe(shards[longest], cuts[longest] if cuts else (), held)
    if ranks == 1:
        alone = shards[0].to(torch.float32, copy=True)
        if residuals is not None:
            add_alone(residuals[0], alone)
        return given(alone)
    chunk, length, like = _sizes(shards, me)
    total = torch.empty(length, dtype=torch.float32, device=like.device)
    if not length and not any(shard.numel() for shard in shards):
        return given(total)
    plan = _planned(shards, residuals, cuts, how, like)
    how.meter.used[plan.spec] = None
    flat = _joined(shards) if plan.fused or plan.parts else None
    left = None if flat is None or residuals is None else _joined_residuals(residuals)
    if plan.fused is not None and flat is not None and (residuals is None or left is not None):
        only = Reduction(plan.codec, how.group, how.meter, residual=left)
        return fused_reduce_scatter(flat, chunk, total, plan.fused, only)
    parts = plan.parts
    alike = (
        residuals is None or isinstance(left, Tensor) or (left is not None and not chunk % BLOCK)
    )
    if parts is not None and flat is not None and alike:
        if not plan.whole:
            plan.whole.append(shards_as_plan(flat.numel(), chunk, cuts or (), len(shards)))
        owners, edges = plan.whole[0]
        only = Reduction(plan.codec, how.group, how.meter, edges, residual=left)
        return scatter_parts(flat, total, owners, parts, only)
    if not plan.rounds:
        lengths = [shard.numel() for shard in shards]
        dtype = sent_dtype(plan.codec, like.dtype, residuals is not None, how.flush)
        plan.rounds.extend(plan_rounds(lengths, cuts, plan, dtype, like.device, how.group))
    return _in_rounds(shards, total, residuals, plan, how)


def _sizes(shards: Sequence[Tensor], me: int) -> tuple[int, int, Tensor]:
    """Return lengths of the first and rank ``me``'s shard, and a tensor of their dtype and device.

    ``Shards`` are not sliced for this: each slice takes the host 1 us.
    """
    if isinstance(shards, Shards):
        flat, chunk = shards.flat, shards.numel
        return chunk, min(chunk, flat.numel() - me * chunk), flat
    return shards[0].numel(), shards[me].numel(), shards[me]


def _planned(
    shards: Sequence[Tensor], residuals: Residuals, cuts: Cuts, how: Reduction, like: Tensor
) -> ReduceScatterPlan:
    """Return the cached plan for messages like this one, making it for the first.

    ``like``: a tensor of the dtype and device of the shards.
    """
    one = isinstance(shards, Shards)
    is_one = one and (residuals is None or isinstance(residuals, Shards))
    lengths = (
        (shards.flat.numel(), shards.numel)
        if isinstance(shards, Shards)
        else tuple(shard.numel() for shard in shards)
    )
    edges = tuple(map(tuple, cuts)) if cuts and any(cuts) else ()
    kinds = (is_one, residuals is None, how.flush, like.dtype, like.device)
    key = ("reduce_scatter", id(how.codec), one, lengths, edges, *kinds)
    found: ReduceScatterPlan | None = how.group.plans.get(key)
    if found is None:
        (codec,) = how.codec.split_error_budget(1, how.group.size, exact=1)
        fused = None if edges else codec.fused(like.device)
        parts = codec.planned(like.device) if edges else None
        found = ReduceScatterPlan(how.codec, codec, codec.spec, fused, parts, is_one)
        found = how.group.keep(key, found, 1 if fused is not None else how.group.size)
    return found


def _joined(shards: Sequence[Tensor]) -> Tensor | None:
    """Return the shards as one tensor if they are contiguous in memory, else None."""
    return shards.flat if isinstance(shards, Shards) else adjacent(shards)


def _joined_residuals(residuals: Sequence[Residual]) -> Residual | None:
    """Return residuals as one if contiguous in memory (few-bit ones with gaps), else None."""
    if isinstance(residuals, Shards):
        return residuals.flat
    wide = [one for one in residuals if isinstance(one, Tensor)]
    return adjacent(wide) if wide else joined(residuals)


def _in_rounds(
    shards: Sequence[Tensor],
    total: Tensor,
    residuals: Residuals,
    plan: ReduceScatterPlan,
    how: Reduction,
) -> Steps[Tensor]:
    """Sum this rank's shard into ``total``, in overlapping rounds (``sum_parts``)."""
    values: Sequence[Tensor] = shards
    if plan.is_one and isinstance(shards, Shards):
        values = [shards.flat]
        residuals = [residuals.flat] if isinstance(residuals, Shards) else None
    steps = [
        sum_parts(each, values, residuals, total, how.group, how.meter) for each in plan.rounds
    ]
    return overlapped(steps)


def _check_residuals(shards: Sequence[Tensor], residuals: Sequence[Residual]) -> None:
    if len(residuals) != len(shards):
        raise CodecError(f"residuals: expected {len(shards)} tensors, found {len(residuals)}")
    for rank, (shard, residual) in enumerate(zip(shards, residuals, strict=True)):
        check_residual(f"residuals[{rank}]", residual, shard.numel())
