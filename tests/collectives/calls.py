"""Collectives of (tensors, codec, group of any kind), with a new meter unless a test passes one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
)
from hybridcomp.collectives import low_rank as factored
from hybridcomp.collectives.low_rank import Factoring, Matrix
from hybridcomp.collectives.wire.handle import Steps


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


def how_of(codec: Codec, group: Any, meter: Meter | None = None, **more: Any) -> Reduction:
    return Reduction(codec, group_of(group), meter or Meter(), **more)


def via_of(
    codec: Codec, group: Any, meter: Meter | None = None, cuts: Sequence[int] = ()
) -> Transfer:
    return Transfer(codec, group_of(group), meter or Meter(), cuts)


def all_reduce(tensor: Tensor, *how: Any, async_op: bool = False, **more: Any) -> Handle:
    return collectives.all_reduce(tensor, how_of(*how, **more), async_op)


def reduce_scatter(
    shards: Sequence[Tensor],
    codec: Codec,
    group: Any,
    meter: Meter | None = None,
    residuals: Sequence[Residual] | None = None,
    cuts: Sequence[Sequence[int]] | None = None,
    async_op: bool = False,
) -> ReduceScatterHandle:
    how = how_of(codec, group, meter)
    return collectives.reduce_scatter(shards, how, residuals, cuts, async_op)


def reduce_to_owners(
    tensor: Tensor, ranges: Sequence[OwnedRange], *how: Any, **more: Any
) -> list[Tensor]:
    return collectives.reduce_to_owners(tensor, ranges, how_of(*how, **more))


def all_gather(
    shard: Tensor, out: Tensor, *via: Any, async_op: bool = False, **more: Any
) -> Handle:
    return collectives.all_gather(shard, out, via_of(*via, **more), async_op)


def all_to_all(
    out: Tensor, values: Tensor, codec: Codec, group: Any, meter: Meter | None = None, **more: Any
) -> Handle:
    return collectives.all_to_all(out, values, via_of(codec, group, meter), **more)


def send(tensor: Tensor, dst: int, *via: Any, **more: Any) -> None:
    collectives.send(tensor, dst, via_of(*via, **more))


def recv(tensor: Tensor, src: int, *via: Any, **more: Any) -> None:
    collectives.recv(tensor, src, via_of(*via, **more))


def low_rank_sum(
    values: Tensor, matrices: Sequence[Matrix], rank: int, group: Any, *,
    residual: Tensor, warm: dict[str, Tensor], meter: Meter | None = None,
) -> Steps[Tensor]:  # fmt: skip
    how = how_of(PowerSgd(rank), group, meter, residual=residual)
    return factored.low_rank_sum(values, Factoring(matrices, rank, warm), how)
