"""all_reduce with three launches on a GPU, reduce_scatter with two, whatever their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec, Fused
from hybridcomp.collectives.wire import POOL, Reduction, Steps, chunk_ranges, first, transport


@dataclass(frozen=True)
class _Plan:
    """What all messages of one size have in common."""

    gives: tuple[int, ...]  # bytes of the first hop, by rank
    takes: tuple[int, ...]
    chunk: int  # elements of every chunk but the last ones
    slot: int  # bytes of its payload
    given: int  # bytes of the first hop
    taken: int


@lru_cache(maxsize=4096)
def _planned(codec: Codec, dtype: torch.dtype, numels: tuple[int, ...], me: int) -> _Plan:
    sizes = [codec.wire_nbytes(numel, dtype) for numel in numels]
    gives = tuple(0 if rank == me else size for rank, size in enumerate(sizes))
    takes = tuple(0 if rank == me else sizes[me] for rank in range(len(sizes)))
    return _Plan(gives, takes, numels[0], sizes[0], sum(gives), sum(takes))


@lru_cache(maxsize=4096)
def _chunks(numel: int, world_size: int) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in chunk_ranges(numel, world_size))


def fused_all_reduce(tensor: Tensor, codec: Codec, fused: Fused, how: Reduction) -> Steps[None]:
    """Sum ``tensor`` over ``group`` in place: the bytes and bits of ``reductions.all_reduce``.

    1 encode every chunk but my own, 2 all-to-all, 3 sum in rank order and encode, without a trip of
    the sum through memory, 4 all-gather, 5 decode all chunks.
    """
    group, meter, residual = how.group, how.meter, how.residual
    me, world_size = group.rank, group.size
    numels = _chunks(tensor.numel(), world_size)
    plan = _planned(codec, tensor.dtype, numels, me)
    # 1, 2
    sent, arrived, received = yield from _scatter(tensor, plan, fused, how)
    # 3
    payload = POOL.take(plan.slot, tensor.device)
    start, stop = me * plan.chunk, me * plan.chunk + numels[me]
    left = None if residual is None else residual[start:stop]
    with meter.coding():
        fused.reduce(
            received, tensor[start:stop], world_size, me, payload, left, how.owner_residual
        )
    # 4
    gathered = POOL.take(world_size * plan.slot, tensor.device)
    wire = first(gathered, world_size * plan.slot)
    yield from transport.all_gather(wire, first(payload, plan.slot), group, meter)
    # 5
    with meter.coding():
        fused.decode(gathered, plan.chunk, plan.slot, tensor)
    POOL.give(sent, arrived, payload, gathered)


def fused_reduce_scatter(
    flat: Tensor, lengths: Sequence[int], total: Tensor, fused: Fused, how: Reduction
) -> Steps[None]:
    """Sum my shard over ``group`` into ``total``: bytes and bits of ``reduce_scatter``.

    ``flat`` and the residual: the shards of all ranks one after the other (``adjacent``).

    1 encode every shard but my own, 2 all-to-all, 3 sum in rank order.
    """
    me, residual = how.group.rank, how.residual
    plan = _planned(how.codec, flat.dtype, tuple(lengths), me)
    # 1, 2
    sent, arrived, received = yield from _scatter(flat, plan, fused, how)
    # 3
    start, stop = me * plan.chunk, me * plan.chunk + lengths[me]
    left = None if residual is None else residual[start:stop]
    with how.meter.coding():
        fused.sum(received, flat[start:stop], len(lengths), me, total, left)
    POOL.give(sent, arrived)


def _scatter(
    flat: Tensor, plan: _Plan, fused: Fused, how: Reduction
) -> Steps[tuple[Tensor, Tensor, Tensor]]:
    """1 encode, 2 all-to-all: ``(two buffers to give back, the payloads for this rank)``."""
    # 1
    group, given, taken = how.group, plan.given, plan.taken
    sent = POOL.take(given, flat.device)
    with how.meter.coding():
        fused.encode(flat, plan.chunk, plan.slot, group.rank, sent, how.residual)
    # 2
    arrived = POOL.take(taken, flat.device)
    received, source = first(arrived, taken), first(sent, given)
    yield from transport.all_to_all(received, source, plan.takes, plan.gives, group, how.meter)
    return sent, arrived, received


def adjacent(shards: Sequence[Tensor]) -> Tensor | None:
    """``shards`` as one tensor, if they follow each other in memory and are chunks of it.

    Chunks are equally long, but for the last that is not empty.
    """
    first, length = shards[0], shards[0].numel()
    storage, position, full = first.untyped_storage().data_ptr(), first.storage_offset(), True
    for shard in shards:
        if shard.untyped_storage().data_ptr() != storage or shard.storage_offset() != position:
            return None
        if shard.numel() > length or (shard.numel() and not full):
            return None
        full = shard.numel() == length
        position += shard.numel()
    return first.as_strided((position - first.storage_offset(),), (1,))
