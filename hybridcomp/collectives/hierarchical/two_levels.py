"""The collectives in two levels: native inside a node, encoded between nodes.

With N nodes of L ranks the flat collectives send an encoded value from every rank to every other
node; here a node sends the encoded sum of its ranks, 1/L of that. The in-node messages are native,
for links that are faster than a codec.

Bounds: what is encoded is a node's sum S_a, and by the triangle inequality the largest magnitude
of a segment of S_a is at most the sum over the node's ranks of their M_r (plus the rounding of an
fp32 sum, which ``Codec.summing`` leaves room for). A codec that keeps
``error <= bound * sum_a M(S_a)`` over N senders therefore keeps ``bound * sum_r M_r`` over all
ranks: the bound of the flat collective holds as it is, with the codec's budget split for N senders
and as many quantizations.

Residuals belong to a node's sum: a rank holds those of its own stretch only, and over the ranks
of a node every element is held once.

``owners`` does the same for buckets whose ranges belong to given ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import moves, reductions
from hybridcomp.collectives.hierarchical.node_grid import Levels, gather_inside, sum_inside
from hybridcomp.collectives.quantizations import all_reduce_codecs
from hybridcomp.collectives.wire.buffers import POOL
from hybridcomp.collectives.wire.chunks import chunk_ranges
from hybridcomp.collectives.wire.handle import Handle, ReduceScatterHandle, Steps
from hybridcomp.collectives.wire.meter import Meter

#: is shown what is about to be encoded
Probe = Callable[[Tensor], None]


def stretch(numel: int, levels: Levels) -> tuple[int, int]:
    """``[start, stop)`` of a flat tensor that this rank sums inside its node."""
    return chunk_ranges(numel, levels.width)[levels.local]


def node_sum(
    values: Tensor,
    lengths: Sequence[int],
    codec: Codec,
    levels: Levels,
    meter: Meter,
    probe: Probe | None,
) -> Steps[tuple[Tensor, Tensor]]:
    """``sum_inside`` as ``codec`` takes it: ``(buffer to give back, the sum, shown to probe)``."""
    buffer, total = yield from sum_inside(values, lengths, levels, meter)
    work = total.to(values.dtype) if codec.lossless else total
    if probe is not None:
        probe(work)
    return buffer, work


def all_reduce(
    tensor: Tensor,
    codec: Codec,
    levels: Levels,
    *,
    meter: Meter,
    residual: Tensor | None = None,
    owner_residual: Tensor | None = None,
    cuts: Sequence[int] = (),
    probe: Probe | None = None,
    async_op: bool = False,
) -> Handle:
    """``collectives.all_reduce`` over nodes and inside them; the same bits on all ranks.

    Args:
        residual: fp32, as long as ``stretch``; owner_residual: as long as this rank's chunk of it
            among the nodes (``chunk_ranges(len, levels.nodes)[levels.node]``).
        cuts: ascending elements of ``stretch`` where no codec block may reach across.
        probe: called with the node's sum before it is encoded.

    The other arguments are those of ``collectives.all_reduce``.
    """
    codec = codec.summing(levels.width, tensor.dtype)
    first = all_reduce_codecs(codec, torch.float32, levels.nodes, tensor.device, cuts)[0]
    codec = first if first.lossless else codec  # a bound too tight for 16 bits: see below
    steps = _all_reduce(
        tensor.detach(), codec, levels, meter, residual, owner_residual, cuts, probe
    )
    return Handle(steps, meter, async_op)


def _all_reduce(
    tensor: Tensor,
    codec: Codec,
    levels: Levels,
    meter: Meter,
    residual: Tensor | None,
    owner_residual: Tensor | None,
    cuts: Sequence[int],
    probe: Probe | None,
) -> Steps[None]:
    """1 sum my stretch inside the node, 2 all-reduce it between nodes, 3 gather inside."""
    if not tensor.numel():
        return
    lengths = [stop - start for start, stop in chunk_ranges(tensor.numel(), levels.width)]
    # 1
    buffer, work = yield from node_sum(tensor, lengths, codec, levels, meter, probe)
    # 2
    handle = reductions.all_reduce(
        work,
        codec,
        levels.outer,
        meter=meter,
        residual=residual,
        owner_residual=owner_residual,
        cuts=cuts,
        async_op=True,
    )
    yield from handle.rest()
    # 3
    wire, rows = yield from gather_inside(work.to(tensor.dtype), lengths, levels, meter)
    for place, row in zip(torch.split(tensor, lengths), rows, strict=True):
        place.copy_(row)
    POOL.give(buffer, wire)


def reduce_scatter(
    shards: Sequence[Tensor],
    codec: Codec,
    levels: Levels,
    *,
    meter: Meter,
    residuals: Sequence[Tensor] | None = None,
    cuts: Sequence[Sequence[int]] | None = None,
    probe: Probe | None = None,
    async_op: bool = False,
) -> ReduceScatterHandle:
    """``collectives.reduce_scatter`` over nodes and inside them.

    Args:
        residuals: one for each node a, as long as ``shards[levels.grid[a][levels.local]]``.
        cuts: the same, of elements of that shard.
    """
    codec = codec.summing(levels.width)
    steps = _reduce_scatter(
        [shard.detach() for shard in shards], codec, levels, meter, residuals, cuts, probe
    )
    return ReduceScatterHandle(steps, meter, async_op)


def _reduce_scatter(
    shards: Sequence[Tensor],
    codec: Codec,
    levels: Levels,
    meter: Meter,
    residuals: Sequence[Tensor] | None,
    cuts: Sequence[Sequence[int]] | None,
    probe: Probe | None,
) -> Steps[Tensor]:
    """1 sum inside the node what goes to my column of the grid, 2 reduce-scatter between nodes."""
    columns = [[row[column] for row in levels.grid] for column in range(levels.width)]
    lengths = [sum(shards[rank].numel() for rank in column) for column in columns]
    # 1
    values = torch.cat([shards[rank] for column in columns for rank in column])
    if not values.numel():
        return values.to(torch.float32)
    buffer, work = yield from node_sum(values, lengths, codec, levels, meter, probe)
    # 2
    mine = torch.split(work, [shards[rank].numel() for rank in columns[levels.local]])
    handle = reductions.reduce_scatter(
        mine, codec, levels.outer, meter=meter, residuals=residuals, cuts=cuts, async_op=True
    )
    result = yield from handle.rest()
    POOL.give(buffer)
    return result


def all_gather(
    shard: Tensor,
    out: Tensor,
    codec: Codec,
    levels: Levels,
    *,
    meter: Meter,
    cuts: Sequence[int] = (),
    async_op: bool = False,
) -> Handle:
    """``collectives.all_gather`` over nodes and inside them; the same bits on all ranks.

    A ring over all ranks carries every payload into N nodes, the way here into N - 1: what is
    saved between the nodes is 1/N. Every rank decodes N shards instead of N * L.
    ``wait()`` posts a second message, so handles must be waited for in one order on all ranks.
    """
    steps = _all_gather(shard.detach(), out.detach(), codec, levels, meter, cuts)
    return Handle(steps, meter, async_op)


def _all_gather(
    shard: Tensor, out: Tensor, codec: Codec, levels: Levels, meter: Meter, cuts: Sequence[int]
) -> Steps[None]:
    """1 gather my column of the grid between nodes, encoded, 2 gather the columns inside."""
    numel = shard.numel()
    if not numel:
        return
    # 1
    column = shard.new_empty(levels.nodes * numel)
    handle = moves.all_gather(
        shard, column, codec, levels.outer, meter=meter, cuts=cuts, async_op=True
    )
    yield from handle.rest()
    # 2
    wire, columns = yield from gather_inside(column, [column.numel()] * levels.width, levels, meter)
    places = out.view(-1, numel)
    for local, gathered in enumerate(columns):
        for row, values in zip(levels.grid, torch.split(gathered, numel), strict=True):
            places[row[local]].copy_(values)
    POOL.give(wire)
