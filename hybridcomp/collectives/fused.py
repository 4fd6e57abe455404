"""Run collectives with codecs that encode all chunks in one GPU launch.

An all_reduce takes three launches and every other collective two, at any size. Messages of tensor
parallelism are so short that the host's time counts. So sizes and offsets are planned once for all
messages of one size, and each message takes one allocation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec, CollectiveKernel
from hybridcomp.codecs.launches import NO_CHUNK
from hybridcomp.codecs.quantized_residual import BLOCK, QuantizedResidual, Residual
from hybridcomp.collectives.wire import chained_gather, transport
from hybridcomp.collectives.wire.chunking import chunk_ranges
from hybridcomp.collectives.wire.encoding import POOL
from hybridcomp.collectives.wire.group import Reduction, Transfer
from hybridcomp.collectives.wire.handle import Steps
from hybridcomp.collectives.wire.splits import Splits

#: alignment in bytes of buffers that share an allocation, since a warp loads this many at once
PLACE = 512


@dataclass(frozen=True)
class _Plan:
    """Sizes and offsets common to all messages of one size."""

    chunk: int  # elements of every chunk except the last ones
    slot: int  # bytes of a whole chunk's payload
    mine: slice  # this rank's elements
    gives: Splits  # bytes sent in an exchange, by rank
    takes: Splits  # bytes received in an exchange, by rank
    places: tuple[int, ...]  # sizes in bytes, alternating: a buffer, then the gap after it


@lru_cache(maxsize=4096)
def _planned(
    codec: Codec, dtype: torch.dtype, numel: int, chunk: int, ranks: int, me: int, gathers: bool
) -> _Plan:
    """Plan an exchange of ``numel`` elements in chunks; ``gathers``: a gather of the sums follows.

    The cache key has the two lengths ``numel`` and ``chunk`` instead of every rank's length, which
    each message would have to hash.
    """
    edges = [min(rank * chunk, numel) for rank in range(ranks + 1)]
    sizes = [codec.wire_nbytes(high - low, dtype) for low, high in pairwise(edges)]
    gives = Splits([0 if rank == me else size for rank, size in enumerate(sizes)])
    takes = Splits([0 if rank == me else sizes[me] for rank in range(ranks)])
    slot = sizes[0]
    places = places_of(gives.total, takes.total, *((slot, ranks * slot) if gathers else ()))
    return _Plan(chunk, slot, slice(edges[me], edges[me + 1]), gives, takes, places)


@lru_cache(maxsize=4096)
def _planned_gather(codec: Codec, dtype: torch.dtype, numel: int, ranks: int) -> _Plan:
    """Plan an all-gather of shards of ``numel`` elements."""
    slot = codec.wire_nbytes(numel, dtype)
    places = places_of(slot, ranks * slot)
    return _Plan(numel, slot, slice(0, 0), Splits(()), Splits(()), places)


def room_of(places: Sequence[int], device: torch.device) -> tuple[Tensor, Sequence[Tensor]]:
    """Allocate one buffer and cut it at ``places``: ``(buffer to give back, its parts)``."""
    buffer, room = POOL.take_bytes(sum(places), device)
    return buffer, room.unsafe_split_with_sizes(places)[::2]


def places_of(*nbytes: int) -> tuple[int, ...]:
    return tuple(chain.from_iterable((size, -size % PLACE) for size in nbytes))


def fits(*residuals: Residual | None) -> bool:
    """Return whether the kernels for all chunks can process these residuals."""
    return all(not isinstance(r, QuantizedResidual) or r.in_blocks for r in residuals)


def _own(residual: Residual | None, plan: _Plan, me: int) -> Residual | None:
    """Return the chunk of rank ``me`` from ``residual``, which covers all chunks."""
    if residual is None or isinstance(residual, Tensor):
        return None if residual is None else residual[plan.mine]
    start = me * -(-plan.chunk // BLOCK) * BLOCK
    return residual[start : start + plan.mine.stop - plan.mine.start]


def fused_all_reduce(
    tensor: Tensor, codec: Codec, fused: CollectiveKernel, how: Reduction
) -> Steps[None]:
    """Sum ``tensor`` over ``group`` in place, with the bytes and results of ``all_reduce``.

    1 encode all chunks but this rank's, 2 all-to-all, 3 sum in rank order and encode the sum in one
    kernel, which does not write the sum to memory, 4 all-gather, 5 decode all chunks.
    """
    group, meter, residual, owner_residual = how.group, how.meter, how.residual, how.owner_residual
    me, ranks = group.rank, group.size
    numel = tensor.numel()
    chunk = chunk_ranges(numel, ranks)[0][1]
    plan = _planned(codec, tensor.dtype, numel, chunk, ranks, me, True)
    room, (sent, received, payload, gathered) = room_of(plan.places, tensor.device)
    # 1
    with meter.coding():
        fused.encode(tensor, plan.chunk, plan.slot, me, sent, residual)
    # 2
    yield transport.all_to_all(received, sent, plan.takes, plan.gives, group, meter)
    # 3
    left = _own(residual, plan, me)
    with meter.coding():
        fused.reduce(received, tensor[plan.mine], ranks, me, payload, left, owner_residual)
    # 4
    yield transport.all_gather(gathered, payload, group, meter)
    # 5
    with meter.coding():
        fused.decode(gathered, plan.chunk, plan.slot, tensor)
    POOL.give(room)


def fused_reduce_scatter(
    fused: CollectiveKernel,
    codec: Codec,
    chunk: int,
    values: Sequence[Tensor],
    residuals: Sequence[Residual] | None,
    total: Tensor,
    via: Transfer,
    begin: Tensor | None = None,
    in_place: bool = False,
) -> Steps[Tensor]:
    """Sum this rank's shard over the group into ``total``, with the results of ``sum_parts``.

    ``values`` and ``residuals``: one tensor each, which holds the shards of all ranks in rank
    order. A shard has ``chunk`` elements; the last shards may be shorter or empty. In a low-bit
    residual each shard begins at a block border.

    1 encode all shards but this rank's, 2 all-to-all, 3 sum in rank order.
    """
    (flat,), (residual,) = values, (None,) if residuals is None else residuals
    group, meter = via.group, via.meter
    me, ranks = group.rank, group.size
    plan = _planned(codec, flat.dtype, flat.numel(), chunk, ranks, me, False)
    room, (sent, received) = room_of(plan.places, flat.device)
    # 1
    with meter.coding():
        fused.encode(flat, plan.chunk, plan.slot, me, sent, residual)
    # 2
    yield transport.all_to_all(received, sent, plan.takes, plan.gives, group, meter)
    # 3
    left = _own(residual, plan, me)
    with meter.coding():
        fused.sum(received, flat[plan.mine], ranks, me, total, left, begin)
    POOL.give(room)
    return total


def fused_all_gather(
    shard: Tensor, out: Tensor, fused: CollectiveKernel, via: Transfer
) -> Steps[None]:
    """Gather equally long shards into ``out``, with the bytes and results of ``all_gather``.

    1 encode this rank's shard, 2 all-gather, 3 decode all shards.
    """
    group, meter, numel = via.group, via.meter, shard.numel()
    plan = _planned_gather(via.codec, shard.dtype, numel, group.size)
    room, (payload, gathered) = room_of(plan.places, shard.device)
    # 1
    with meter.coding():
        fused.encode(shard, numel, plan.slot, NO_CHUNK, payload)
    # 2
    yield chained_gather.all_gather(gathered, payload, group, meter)
    # 3
    with meter.coding():
        fused.decode(gathered, numel, plan.slot, out)
    POOL.give(room)


def fused_all_to_all(
    out: Tensor, values: Tensor, fused: CollectiveKernel, via: Transfer
) -> Steps[None]:
    """Exchange equally long parts, with the bytes and results of ``all_to_all``.

    1 encode all parts but this rank's, which is copied, 2 all-to-all, 3 decode.
    """
    group, meter = via.group, via.meter
    me, ranks = group.rank, group.size
    numel = values.numel()
    plan = _planned(via.codec, values.dtype, numel, numel // ranks, ranks, me, False)
    room, (sent, received) = room_of(plan.places, values.device)
    # 1
    out[plan.mine].copy_(values[plan.mine])
    with meter.coding():
        fused.encode(values, plan.chunk, plan.slot, me, sent)
    # 2
    yield transport.all_to_all(received, sent, plan.takes, plan.gives, group, meter)
    # 3
    with meter.coding():
        fused.decode(received, plan.chunk, plan.slot, out, me)
    POOL.give(room)


def adjacent(shards: Sequence[Tensor]) -> Tensor | None:
    """Return ``shards`` as one flat tensor if they are consecutive in memory, else None.

    Shards must be equally long, except for the last non-empty one and empty ones after it.
    """
    start, length, size = shards[0].data_ptr(), shards[0].numel(), shards[0].itemsize
    total, full, last = 0, True, shards[0]
    for shard in shards:
        numel = shard.numel()
        if not numel:  # an empty tensor's address may be 0
            full = False
            continue
        if shard.data_ptr() != start + total * size or numel > length or not full:
            return None
        full, last = numel == length, shard
        total += numel
    if last.untyped_storage().data_ptr() != shards[0].untyped_storage().data_ptr():
        return None  # separate tensors that are adjacent only by chance
    return shards[0].as_strided((total,), (1,))
