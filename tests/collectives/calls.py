"""Collectives with all arguments explicit, for any kind of group: shorter in tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybridcomp import collectives
from hybridcomp.codecs import PowerSgd
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.quantized_residual import Residual
from hybridcomp.collectives import (
    Group,
    Handle,
    Levels,
    Meter,
    OwnedRange,
    ReduceScatterHandle,
    Reduction,
    Transfer,
    chunk_ranges,
)
from hybridcomp.collectives import low_rank as factored
from hybridcomp.collectives.low_rank import Factoring, Matrix
from hybridcomp.collectives.wire import Steps
from tests.collectives.common import values_of


def group_of(group: Any) -> Group:
    """Wrap a torch group, None, a group of threads, or the levels of one."""
    if isinstance(group, Group):
        return group
    if isinstance(group, Levels):
        me = group.grid[group.node][group.local]
        return Group(group.inner.process_group, me, group.nodes * group.width, levels=group)
    if hasattr(group, "board"):
        return Group(group, group.rank, group.board.size)
    return Group.of(group)


def all_reduce(
    tensor: Tensor, codec: Codec, group: Any, *, meter: Meter, async_op: bool = False, **more: Any
) -> Handle:
    how = Reduction(codec, group_of(group), meter, **more)
    return collectives.all_reduce(tensor, how, async_op)


def reduce_scatter(
    shards: Sequence[Tensor],
    codec: Codec,
    group: Any,
    *,
    meter: Meter,
    residuals: Sequence[Residual] | None = None,
    cuts: Sequence[Sequence[int]] | None = None,
    async_op: bool = False,
) -> ReduceScatterHandle:
    how = Reduction(codec, group_of(group), meter)
    return collectives.reduce_scatter(shards, how, residuals, cuts, async_op)


def reduce_to_owners(
    tensor: Tensor,
    ranges: Sequence[OwnedRange],
    codec: Codec,
    group: Any,
    *,
    meter: Meter,
    **more: Any,
) -> list[Tensor]:
    how = Reduction(codec, group_of(group), meter, **more)
    return collectives.reduce_to_owners(tensor, ranges, how)


def all_gather(
    shard: Tensor,
    out: Tensor,
    codec: Codec,
    group: Any,
    *,
    meter: Meter,
    cuts: Sequence[int] = (),
    async_op: bool = False,
) -> Handle:
    via = Transfer(codec, group_of(group), meter, cuts)
    return collectives.all_gather(shard, out, via, async_op)


def all_to_all(
    out: Tensor, values: Tensor, codec: Codec, group: Any, *, meter: Meter, **more: Any
) -> Handle:
    return collectives.all_to_all(out, values, Transfer(codec, group_of(group), meter), **more)


def send(tensor: Tensor, dst: int, codec: Codec, group: Any, *, meter: Meter) -> None:
    collectives.send(tensor, dst, Transfer(codec, group_of(group), meter))


def recv(tensor: Tensor, src: int, codec: Codec, group: Any, *, meter: Meter) -> None:
    collectives.recv(tensor, src, Transfer(codec, group_of(group), meter))


def low_rank_sum(
    values: Tensor,
    matrices: Sequence[Matrix],
    rank: int,
    group: Any,
    *,
    meter: Meter,
    residual: Tensor,
    warm: dict[str, Tensor],
) -> Steps[Tensor]:
    how = Reduction(PowerSgd(rank), group_of(group), meter, residual=residual)
    return factored.low_rank_sum(values, Factoring(matrices, rank, warm), how)


def fed_back(codec: Codec, levels: Levels, me: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the given, delivered and residual values of rank ``me`` over three all_reduces."""
    numel = 1000
    start, stop = chunk_ranges(numel, levels.width)[levels.local]
    low, high = chunk_ranges(stop - start, levels.nodes)[levels.node]
    residual, owner = torch.zeros(stop - start), torch.zeros(high - low)
    given, delivered = torch.zeros(numel).double(), torch.zeros(numel).double()
    for step in range(3):
        tensor = values_of(me, numel, seed=step)
        given += tensor
        all_reduce(tensor, codec, levels, meter=Meter(), residual=residual, owner_residual=owner)
        if me == 0:
            delivered += tensor
    held = torch.zeros(numel).double()
    held[start:stop] += residual
    held[start + low : start + high] += owner
    return given, delivered, held
