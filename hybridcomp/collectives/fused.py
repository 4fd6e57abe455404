"""all_reduce with three launches on a GPU, whatever the size of the message and of the group."""

from __future__ import annotations

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
    # 1
    gives = [0 if rank == me else size for rank, size in enumerate(sizes)]
    sent = POOL.take(sum(gives), tensor.device)
    with meter.coding():
        fused.encode(tensor, chunk, slot, me, sent, residual)
    # 2
    takes = [0 if rank == me else sizes[me] for rank in range(world_size)]
    arrived = POOL.take(sum(takes), tensor.device)
    meter.sent_each(gives)
    yield from transport.all_to_all(arrived[: sum(takes)], sent[: sum(gives)], takes, gives, group)
    # 3
    payload = POOL.take(slot, tensor.device)
    mine = slice(me * chunk, me * chunk + numels[me])
    left = None if residual is None else residual[mine]
    received = arrived[: sum(takes)]
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
