"""all_reduce with three launches on a GPU, reduce_scatter with two, whatever their sizes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed import ProcessGroup, get_rank, get_world_size

from hybridcomp.codecs.base import Codec, Fused
from hybridcomp.collectives import transport
from hybridcomp.collectives.buffers import POOL
from hybridcomp.collectives.chunks import chunk_ranges
from hybridcomp.collectives.encoding import Slots
from hybridcomp.collectives.exchange import gather
from hybridcomp.collectives.handle import Steps
from hybridcomp.collectives.meter import Meter


def fused_all_reduce(
    tensor: Tensor,
    codec: Codec,
    fused: Fused,
    group: ProcessGroup | None,
    meter: Meter,
    residual: Tensor | None = None,
    owner_residual: Tensor | None = None,
) -> Steps[None]:
    """Sum ``tensor`` over ``group`` in place: the bytes and bits of ``reductions.all_reduce``.

    1 encode every chunk but my own, 2 all-to-all, 3 sum in rank order and encode, without a trip of
    the sum through memory, 4 all-gather, 5 decode all chunks.
    """
    me, world_size, dtype = get_rank(group), get_world_size(group), tensor.dtype
    numels = [stop - start for start, stop in chunk_ranges(tensor.numel(), world_size)]
    sizes = [codec.wire_nbytes(numel, dtype) for numel in numels]
    chunk, slot = numels[0], sizes[0]
    # 1, 2
    sent, arrived, received = yield from _scatter(
        tensor, sizes, chunk, fused, group, meter, residual
    )
    # 3
    payload = POOL.take(slot, tensor.device)
    mine = slice(me * chunk, me * chunk + numels[me])
    left = None if residual is None else residual[mine]
    with meter.coding():
        fused.reduce(received, tensor[mine], world_size, me, payload, left, owner_residual)
    # 4
    own = Slots(payload, [sizes[me]] if numels[me] else [])
    rows = [[numel] if numel else [] for numel in numels]
    _, gathered = yield from gather(codec, dtype, own, rows, group, meter)
    # 5
    with meter.coding():
        fused.decode(gathered, chunk, slot, tensor)
    POOL.give(sent, arrived, payload, gathered)


def fused_reduce_scatter(
    flat: Tensor,
    lengths: Sequence[int],
    total: Tensor,
    codec: Codec,
    fused: Fused,
    group: ProcessGroup | None,
    meter: Meter,
    residual: Tensor | None = None,
) -> Steps[None]:
    """Sum my shard over ``group`` into ``total``: bytes and bits of ``reductions.reduce_scatter``.

    ``flat`` and ``residual``: the shards of all ranks one after the other (``adjacent``).

    1 encode every shard but my own, 2 all-to-all, 3 sum in rank order.
    """
    me, chunk = get_rank(group), lengths[0]
    sizes = [codec.wire_nbytes(length, flat.dtype) for length in lengths]
    # 1, 2
    sent, arrived, received = yield from _scatter(flat, sizes, chunk, fused, group, meter, residual)
    # 3
    mine = slice(me * chunk, me * chunk + lengths[me])
    left = None if residual is None else residual[mine]
    with meter.coding():
        fused.sum(received, flat[mine], len(lengths), me, total, left)
    POOL.give(sent, arrived)


def _scatter(
    flat: Tensor,
    sizes: Sequence[int],
    chunk: int,
    fused: Fused,
    group: ProcessGroup | None,
    meter: Meter,
    residual: Tensor | None,
) -> Steps[tuple[Tensor, Tensor, Tensor]]:
    """1 encode, 2 all-to-all: ``(two buffers to give back, the payloads for this rank)``.

    ``sizes``: by rank, the bytes of its payload; every chunk but the last ones is ``chunk`` long.
    """
    me = get_rank(group)
    # 1
    gives = [0 if rank == me else size for rank, size in enumerate(sizes)]
    sent = POOL.take(sum(gives), flat.device)
    with meter.coding():
        fused.encode(flat, chunk, sizes[0], me, sent, residual)
    # 2
    takes = [0 if rank == me else sizes[me] for rank in range(len(sizes))]
    arrived = POOL.take(sum(takes), flat.device)
    meter.sent_each(gives)
    received = arrived[: sum(takes)]
    yield from transport.all_to_all(received, sent[: sum(gives)], takes, gives, group)
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
