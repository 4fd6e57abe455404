"""Sum, gather and scatter inside a node, natively, for collectives in two levels.

With N nodes of L ranks, every rank of a flat collective sends its encoded values to other nodes. In
two levels a node sends only the encoded sum of its ranks, 1/L of these bytes. The messages of this
module are native, for links that are faster than a codec.

Bounds: let M(x) be the absmax of a segment of x, and M_r that of rank r. The codec encodes the sum
S_a of node a. By the triangle inequality M(S_a) is at most the sum of M_r over the node's ranks
(plus the rounding of an fp32 sum, for which ``Codec.for_presummed`` allows). So a codec that keeps
``error <= bound * sum_a M(S_a)`` over N senders also keeps ``bound * sum_r M_r`` over all ranks:
the flat collective's bound holds unchanged, if the codec splits its error budget for N senders.

Residuals belong to a node's sum: a rank holds only the residuals of its slice, so the ranks of a
node together hold one residual per element.

In more than two levels "node" here stands for a largest unit, such as a site of several nodes. Its
ranks sum and gather level by level, and values that leave the unit are quantized as often as in two
levels. Level l may have its own codec for its sums, with bound e_l for the values that a rank
sends. The error of the total is then at most the sum of e_l over all senders of all such levels,
plus the error of the codec between largest units.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.first_hop import FirstHop
from hybridcomp.collectives.fused import fused_reduce_scatter
from hybridcomp.collectives.wire import transport
from hybridcomp.collectives.wire.chunking import OwnedRange, Range, chunk_ranges
from hybridcomp.collectives.wire.encoding import POOL, add_values
from hybridcomp.collectives.wire.exchange_plan import SummedPart, plan_sum, sent_dtype
from hybridcomp.collectives.wire.exchanges import sum_parts
from hybridcomp.collectives.wire.group import Group, Levels, Reduction, Transfer
from hybridcomp.collectives.wire.handle import Meter, Steps


def node_sum(
    values: Tensor, lengths: Sequence[int], codec: Codec, how: Reduction
) -> Steps[tuple[Tensor, Tensor]]:
    """Sum over the node: ``(buffer to give back, this rank's slice of the sum)``.

    Sums as ``_sum_levels`` does and adds ``how.kept``, the sum kept over earlier messages. The
    slice is fp32, or of the dtype of ``values`` for a lossless codec that flushes no residuals.
    """
    buffer, total = yield from _sum_levels(values, lengths, how)
    if how.kept is not None:
        with how.meter.coding():
            total.add_(how.kept)
    return buffer, total.to(values.dtype) if codec.lossless and not how.flush else total


def keep_sum(values: Tensor, lengths: Sequence[int], how: Transfer, total: Tensor) -> Steps[None]:
    """Sum over the node and add this rank's slice to ``total`` (fp32); nothing leaves the node.

    ``values`` and ``lengths``: as for ``_sum_levels``.
    """
    buffer, found = yield from _sum_levels(values, lengths, how)
    with how.meter.coding():
        total.add_(found)
    POOL.give(buffer)


def _sum_levels(
    values: Tensor, lengths: Sequence[int], how: Transfer
) -> Steps[tuple[Tensor, Tensor]]:
    """Sum over the node: ``(buffer to give back, this rank's slice of the fp32 sum)``.

    ``values`` (1-D, contiguous) holds a slice of ``lengths[l]`` elements for every local rank l.
    Each rank receives its slice from all ranks by an all-to-all, in the dtype of ``values``, and
    sums in fp32 by local rank. This sends the bytes of a reduce-scatter, without rounding partial
    sums to 16 bits. In more than two levels, the fp32 sums of one level are the values of the next.
    """
    levels = how.group.levels
    assert levels is not None
    buffer: Tensor | None = None
    for number, group in enumerate(levels.stages):
        each = len(lengths) // group.size
        cut = [sum(lengths[at : at + each]) for at in range(0, len(lengths), each)]
        lengths = lengths[group.rank * each :][:each]
        own = levels.codecs[number] if levels.codecs else None
        if own is None:
            summed, values = yield from _sum_stretch(values, cut, group, how.meter)
        else:
            summed, values = yield from _sum_encoded(values, cut, Transfer(own, group, how.meter))
        POOL.give(buffer)
        buffer = summed
    assert buffer is not None
    return buffer, values


def _sum_stretch(
    values: Tensor, lengths: Sequence[int], group: Group, meter: Meter
) -> Steps[tuple[Tensor, Tensor]]:
    """Sum over ``group``: ``(buffer to give back, this rank's slice of the fp32 sum)``.

    ``lengths``: elements of ``values`` for every rank of ``group``, in order.
    """
    mine, size = lengths[group.rank], values.dtype.itemsize
    wire = POOL.take(group.size * mine * size, values.device)
    received = wire[: group.size * mine * size]
    yield transport.all_to_all(
        received,
        values.view(torch.uint8),
        [mine * size] * group.size,
        [length * size for length in lengths],
        group,
        meter,
    )
    buffer, total = POOL.take_fp32(mine, values.device)
    with meter.coding():
        own, *others = received.view(values.dtype).view(group.size, mine)
        total.copy_(own)
        for row in others:
            add_values(total, row)
    POOL.give(wire)
    return buffer, total


def _sum_encoded(
    values: Tensor, lengths: Sequence[int], via: Transfer
) -> Steps[tuple[Tensor, Tensor]]:
    """Sum like ``_sum_stretch``, from encoded values; each rank adds its own values exactly.

    The sum is in rank order. Blocks of the codec may cross borders of parameters.
    """
    codec, group = via.codec, via.group
    buffer, total = POOL.take_fp32(lengths[group.rank], values.device)
    via.meter.used[codec.spec] = None
    key = ("level", id(codec), *lengths, values.dtype, values.device)
    found: FirstHop | None = group.plans.get(key)
    if found is None:
        found = group.keep(key, _level_plan(values, lengths, via), group.size)
    yield from found.sum([values], None, total, via)
    return buffer, total


def _level_plan(values: Tensor, lengths: Sequence[int], via: Transfer) -> FirstHop:
    """Plan ``_sum_encoded``: by kernels for whole chunks, or in one exchange."""
    codec, group, device = via.codec, via.group, values.device
    ends = list(accumulate(lengths, initial=0))
    fused = codec.fused(device) if ends[1] else None
    if fused is not None and ends == [min(n * ends[1], ends[-1]) for n in range(len(ends))]:
        return FirstHop(codec, "chunks", (partial(fused_reduce_scatter, fused, codec, ends[1]),))
    parts = [SummedPart(*edge, (rank,)) for rank, edge in enumerate(pairwise(ends))]
    dtype = sent_dtype(codec, values.dtype, wide=False)
    plan = plan_sum(parts, codec, dtype, device, group)
    return FirstHop(codec, "rounds", (partial(sum_parts, plan),))


def _gather(values: Tensor, stages: Sequence[Group], meter: Meter) -> Steps[tuple[Tensor, Tensor]]:
    """Gather equally long ``values`` (1-D, contiguous) over the groups ``stages``, the last first.

    Each level gathers the whole result of the previous one, so the final order is by local index.
    Returns ``(buffer to give back, gathered values)``.
    """
    buffer: Tensor | None = None
    for group in reversed(stages):
        nbytes = group.size * values.nbytes
        wire, gathered = POOL.take_bytes(nbytes, values.device)
        yield transport.all_gather(gathered, values.view(torch.uint8), group, meter)
        POOL.give(buffer)
        buffer, values = wire, gathered[:nbytes].view(values.dtype)
    assert buffer is not None
    return buffer, values


def join_columns(
    shards: Sequence[Tensor], flat: Tensor | None, levels: Levels
) -> tuple[Tensor, list[int], int | list[int]]:
    """Join ``shards``, given by group rank, in the order in which ``node_sum`` takes them.

    Returns ``(values, elements for each local rank, elements of a shard in this rank's column)``.
    The last is one number if the column's shards are equally long, else a number for each node.
    ``flat``: the shards as one tensor, if they are contiguous in memory and ``levels`` has a shape;
    equally long shards in ``flat`` are reordered by one copy, without a loop over shards.
    """
    each = shards[0].numel()
    if flat is not None and flat.numel() == each * len(shards):
        values = _reversed(flat.view(*levels.shape, each)).flatten()
        return values, [levels.nodes * each] * levels.width, each
    columns = [[row[column] for row in levels.grid] for column in range(levels.width)]
    lengths = [sum(shards[rank].numel() for rank in column) for column in columns]
    values = torch.cat([shards[rank] for column in columns for rank in column])
    own = [shards[rank].numel() for rank in levels.column]
    return values, lengths, own[0] if own[0] and len(set(own)) == 1 else own


def place_columns(column: Tensor, out: Tensor, levels: Levels, meter: Meter) -> Steps[None]:
    """Gather the ``column`` of every local rank over the node and write it into ``out``.

    ``column``: equally long shards of the ranks of ``levels.gathered``, in order; ``out``: the
    shards of all ranks, by group rank, written by one copy. In more than two levels "node" is the
    innermost unit.
    """
    numel, shape = column.numel() // levels.gathered.size, levels.shape
    wire, found = yield from _gather(column, levels.stages[:1], meter)
    if shape:
        out.view(*shape, numel).copy_(_reversed(found.view(*reversed(shape), numel)))
    else:
        out.view(-1, numel).index_copy_(0, levels.by_column(out.device), found.view(-1, numel))
    POOL.give(wire)


def _reversed(cube: Tensor) -> Tensor:
    """Return ``cube`` with all dimensions but the last in reverse order; a view."""
    return cube.permute(*range(cube.dim() - 2, -1, -1), -1)


def gather_inside(
    shard: Tensor, lengths: Sequence[int], levels: Levels, meter: Meter
) -> Steps[tuple[Tensor, list[Tensor]]]:
    """Gather over the node: ``(buffer to give back, values by local rank)``.

    ``shard``: ``lengths[levels.local]`` elements. Every rank's slot has the longest length.
    """
    slot = max(lengths)
    padded = shard
    if shard.numel() < slot:
        padded = torch.cat([shard, shard.new_zeros(slot - shard.numel())])
    wire, gathered = yield from _gather(padded, levels.stages, meter)
    rows = gathered.view(levels.width, slot)
    return wire, [row[:length] for row, length in zip(rows, lengths, strict=True)]


def ranges_of_nodes(
    ranges: Sequence[OwnedRange], within: Range, levels: Levels
) -> list[OwnedRange]:
    """Return the parts of ``ranges`` in ``within``, relative to its start, owned by nodes."""
    node_of = levels.node_of
    return [
        OwnedRange(low - within[0], high - within[0], tuple(sorted({node_of[r] for r in owners})))
        for low, high, owners in _within(ranges, within)
    ]


def _within(ranges: Sequence[OwnedRange], edges: Range) -> list[tuple[int, int, tuple[int, ...]]]:
    cut = [(max(r.start, edges[0]), min(r.stop, edges[1]), r.ranks) for r in ranges]
    return [part for part in cut if part[0] < part[1]]


def scatter_intra_node(
    ranges: Sequence[OwnedRange],
    tensor: Tensor,
    sums: Sequence[Tensor],
    levels: Levels,
    meter: Meter,
) -> Steps[list[Tensor]]:
    """Send ``sums``, the sums in this rank's slice, to their owners on this node, in fp32.

    Returns the sum of every range that this rank owns, in order.
    """
    mates = levels.grid[levels.node]
    me = mates[levels.local]
    #: for each local rank, the parts of this local rank's slice that owners on this node need
    needed = [
        [part for part in _within(ranges, edges) if set(part[2]) & set(mates)]
        for edges in chunk_ranges(tensor.numel(), levels.width)
    ]
    own = list(zip(needed[levels.local], sums, strict=True))
    arrived = yield from _exchange_inside(
        [[total for part, total in own if mate in part[2]] for mate in mates],
        [[high - low for low, high, ranks in row if me in ranks] for row in needed],
        tensor.device,
        levels,
        meter,
    )
    results = [
        (owned, tensor.new_empty(owned.stop - owned.start, dtype=torch.float32))
        for owned in ranges
        if me in owned.ranks
    ]
    parts = [(low, high) for row in needed for low, high, ranks in row if me in ranks]
    for (low, high), total in zip(parts, (t for row in arrived for t in row), strict=True):
        for owned, out in results:
            if owned.start <= low and high <= owned.stop:
                out[low - owned.start : high - owned.start].copy_(total)
    return [out for _, out in results]


def _exchange_inside(
    rows: Sequence[Sequence[Tensor]],
    numels: Sequence[Sequence[int]],
    device: torch.device,
    levels: Levels,
    meter: Meter,
) -> Steps[list[list[Tensor]]]:
    """Send the tensors ``rows[l]`` to local rank l; return the tensors received, by local rank.

    ``numels[l]``: elements of each tensor from local rank l. All tensors are fp32. A rank's tensors
    for itself are returned uncopied.
    """
    me = levels.local
    order = [local for local in levels.order if local != me]
    parts = [part for local in order for part in rows[local]]
    sent = torch.cat(parts) if parts else torch.empty(0, device=device, dtype=torch.float32)
    gives = [sum(part.numel() for part in rows[i]) if i != me else 0 for i in levels.order]
    takes = [sum(numels[i]) if i != me else 0 for i in levels.order]
    received = torch.empty(sum(takes), dtype=torch.float32, device=device)
    yield transport.all_to_all(
        received.view(torch.uint8),
        sent.view(torch.uint8),
        [4 * n for n in takes],
        [4 * n for n in gives],
        levels.inner,
        meter,
    )
    arrived = {me: list(rows[me])}
    for local, stretch in zip(levels.order, torch.split(received, takes), strict=True):
        if local != me:
            arrived[local] = list(torch.split(stretch, list(numels[local])))
    return [arrived[local] for local in range(levels.width)]
