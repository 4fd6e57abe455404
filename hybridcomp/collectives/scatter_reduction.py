"""reduce_scatter of encoded shards: each rank gets the fp32 sum of its shard over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import overload

import torch
from torch import Tensor

from hybridcomp.codecs.quantized_residual import BLOCK, QuantizedResidual, Residual, as_fp32
from hybridcomp.codecs.residual_runs import joined
from hybridcomp.collectives.first_hop import FirstHop, plan_first_hop
from hybridcomp.collectives.fused import adjacent
from hybridcomp.collectives.hierarchical.intra_node import join_columns, keep_sum, node_sum
from hybridcomp.collectives.owner_plan import direct_plan
from hybridcomp.collectives.wire.chunking import OwnedRange
from hybridcomp.collectives.wire.encoding import POOL, check_residual, check_values
from hybridcomp.collectives.wire.group import Levels, Reduction, Transfer
from hybridcomp.collectives.wire.handle import ReduceScatterHandle, Steps
from hybridcomp.collectives.wire.steps import add_alone, given
from hybridcomp.errors import CodecError


class Shards(Sequence[Tensor]):
    """A flat tensor as shards, one for each rank, sliced only on access.

    Attributes:
        flat: 1-D and contiguous.
        numel: elements of a shard; the last one may be shorter.
        ranks: number of shards.
        shape: empty if shards in ``flat`` are in the order of group ranks. Nodes and ranks per node
            if they are ordered by local index, then by node, as ``node_sum`` takes them; shards are
            then equally long.
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
    values, since this rank adds its own values exactly. In two levels nodes take the place of
    ranks.

    Args:
        shards: one 1-D contiguous tensor per group rank, of one dtype; ``shards[r]`` goes to rank
            r. Lengths may be uneven or 0, but are the same on all ranks. Not modified. With
            ``Shards`` the host's time does not grow with the group.
        how: codec, group, meter and probe; its residuals and cuts are not used.
        residuals: for error feedback, one residual for each shard of ``group.receivers`` and as
            long as this shard; updated in place; on all ranks or on none.
        cuts: for each shard of ``group.receivers``, ascending positions that no codec block may
            cross.
        async_op: as for ``all_reduce``.

    Returns a handle whose ``wait()`` gives a new fp32 tensor of ``shards[me].numel()`` elements.
    Raises CodecError on other tensors.
    """
    shards = _checked(shards, how.group.size)
    if how.group.levels is None:
        steps = _flat(shards, how, residuals, cuts)
    else:
        steps = _in_two_levels(shards, how, residuals, cuts)
    return ReduceScatterHandle(steps, how.meter, async_op)


def keep_shards(
    shards: Sequence[Tensor], how: Transfer, total: Tensor, async_op: bool = False
) -> ReduceScatterHandle:
    """Sum the shards of this rank's column over the node and add the sums to ``total``, fp32.

    ``total``: as long as all shards of ``group.receivers``. A later ``reduce_scatter`` of equally
    long shards sends ``total``, if the caller passes it as ``Reduction.kept``. Returns a handle
    whose ``wait()`` gives zeros in place of a sum.
    """
    steps = _keep(_checked(shards, how.group.size), how, total)
    return ReduceScatterHandle(steps, how.meter, async_op)


def _keep(shards: Sequence[Tensor], how: Transfer, total: Tensor) -> Steps[Tensor]:
    levels = how.group.levels
    assert levels is not None
    values, lengths, _ = _columns(shards, levels)
    if values.numel():
        yield from keep_sum(values, lengths, how, total)
    return total.new_zeros(_length(shards, how.group.rank))


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
    values, lengths, column = _columns(shards, levels)
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


def _columns(shards: Sequence[Tensor], levels: Levels) -> tuple[Tensor, list[int], int | list[int]]:
    """Return ``join_columns`` of ``shards``, uncopied if they are in the order of columns."""
    if isinstance(shards, Shards) and shards.shape:
        return shards.flat, [levels.nodes * shards.numel] * levels.width, shards.numel
    return join_columns(shards, _joined(shards) if levels.shape else None, levels)


def _flat(
    shards: Sequence[Tensor], how: Reduction, residuals: Residuals, cuts: Cuts
) -> Steps[Tensor]:
    """Reduce-scatter on one level: in two launches, or in overlapping rounds."""
    me, ranks = how.group.rank, how.group.size
    if isinstance(residuals, Shards) and isinstance(shards, Shards) and residuals.ranks == ranks:
        check_residual("residuals", residuals.flat, shards.flat.numel())
    elif residuals is not None:
        if len(residuals) != len(shards):
            raise CodecError(f"residuals: expected {len(shards)} tensors, found {len(residuals)}")
        for rank, (shard, residual) in enumerate(zip(shards, residuals, strict=True)):
            check_residual(f"residuals[{rank}]", residual, shard.numel())
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
    numel, like = _length(shards, me), shards.flat if isinstance(shards, Shards) else shards[me]
    total = torch.empty(numel, dtype=torch.float32, device=like.device)
    if not numel and not any(shard.numel() for shard in shards):
        return given(total)
    whole: tuple[Tensor, Residual | None] | None = None
    if isinstance(shards, Shards) and (residuals is None or isinstance(residuals, Shards)):
        whole = shards.flat, None if residuals is None else residuals.flat
    one = whole is not None
    plan = _planned(shards, residuals, cuts, how, like, one)
    if plan.by != "rounds" and not one:
        whole = _as_one(shards, residuals)
    if plan.by != "rounds" and (whole is None or not _fits(plan, whole[1], shards)):
        plan = _planned(shards, residuals, cuts, how, like, one, kernels=False)
        whole = whole if one else None
    how.meter.used[plan.codec.spec] = None
    if whole is not None:
        shards, residuals = [whole[0]], None if whole[1] is None else [whole[1]]
    return plan.sum(shards, residuals, total, how)


def _length(shards: Sequence[Tensor], rank: int) -> int:
    """Return the length of a shard without slicing ``Shards``, which would take the host 1 us."""
    if isinstance(shards, Shards):
        return max(0, min(shards.numel, shards.flat.numel() - rank * shards.numel))
    return shards[rank].numel()


def _planned(
    shards: Sequence[Tensor],
    residuals: Residuals,
    cuts: Cuts,
    how: Reduction,
    like: Tensor,
    one: bool,
    kernels: bool = True,
) -> FirstHop:
    """Return the cached plan for messages like this one, making it for the first.

    Args:
        like: a tensor of the dtype and device of the shards.
        one: whether shards and residuals are one tensor each.
        kernels: whether kernels may sum the shards, which they take as one tensor.
    """
    lengths = (
        (shards.flat.numel(), shards.numel)
        if isinstance(shards, Shards)
        else tuple(shard.numel() for shard in shards)
    )
    edges = tuple(map(tuple, cuts)) if cuts and any(cuts) else ()
    kinds = (one, kernels, residuals is None, how.flush, like.dtype, like.device)
    key = ("reduce_scatter", id(how.codec), isinstance(shards, Shards), lengths, edges, *kinds)
    found: FirstHop | None = how.group.plans.get(key)
    if found is None:
        (codec,) = how.codec.split_error_budget(1, how.group.size, exact=1)
        ends = list(accumulate([_length(shards, rank) for rank in range(len(shards))], initial=0))
        ranges = tuple(OwnedRange(*edge, (rank,)) for rank, edge in enumerate(pairwise(ends)))
        whole = [ends[rank] + cut for rank, row in enumerate(edges) for cut in row]
        via = Transfer(codec, how.group, how.meter, whole, flush=how.flush)
        found = plan_first_hop(
            direct_plan(ranges), [codec], like, via, residuals is not None,
            chunk=ends[1], starts=None if one else ends, kernels=kernels,
        )  # fmt: skip
        weight = 1 if found.by == "chunks" else how.group.size
        found = how.group.keep(key, replace(found, held=how.codec), weight)
    return found


def _joined(shards: Sequence[Tensor]) -> Tensor | None:
    """Return the shards as one tensor if they are contiguous in memory, else None."""
    return shards.flat if isinstance(shards, Shards) else adjacent(shards)


def _as_one(
    shards: Sequence[Tensor], residuals: Residuals
) -> tuple[Tensor, Residual | None] | None:
    """Return shards and residuals as one tensor each if they are contiguous in memory, else None.

    Low-bit residuals may have gaps between shards, since each shard begins at a block border.
    """
    flat, left = _joined(shards), None  # type: Tensor | None, Residual | None
    if isinstance(residuals, Shards):
        left = residuals.flat
    elif residuals is not None:
        wide = [one for one in residuals if isinstance(one, Tensor)]
        left = adjacent(wide) if wide else joined(residuals)
    return None if flat is None or (left is None and residuals is not None) else (flat, left)


def _fits(plan: FirstHop, left: Residual | None, shards: Sequence[Tensor]) -> bool:
    """Return whether the kernels of ``plan`` can process the residual ``left`` of all shards."""
    gaps = isinstance(left, QuantizedResidual) and bool(_length(shards, 0) % BLOCK)
    return plan.by != "table" or not gaps
