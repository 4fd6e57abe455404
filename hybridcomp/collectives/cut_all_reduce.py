"""All-reduce tensors with boundaries in a constant number of kernel launches.

For codecs with kernels for all slices of a plan; bytes and results equal ``all_reduce``'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec, PlannedKernel
from hybridcomp.codecs.launches import PlannedStretch, StretchTable
from hybridcomp.codecs.quantized_residual import QuantizedResidual
from hybridcomp.collectives.fused import places_of, room_of
from hybridcomp.collectives.owner_exchange import even_plan, exchange_of, sum_at_owners
from hybridcomp.collectives.owner_plan import OwnerPlan
from hybridcomp.collectives.wire import (
    POOL,
    Range,
    Reduction,
    Splits,
    Steps,
    chained_gather,
    chunk_ranges,
    settle,
    show_overflow,
    stretches,
    transport,
)


@dataclass(frozen=True, eq=False)
class CutAllReduce:
    """Two hops of an all-reduce with boundaries: sum each chunk at its owner, then gather.

    Attributes:
        kernels: kernels of the two quantizations.
        owners: each rank's chunk.
        mine: ``[start, stop)`` of this rank's chunk.
        sent, arriving: slices of this rank's chunk, and slices of the whole tensor.
        places: bytes for this rank's payloads and for all ranks' payloads, in one allocation.
    """

    kernels: tuple[PlannedKernel, PlannedKernel]
    owners: OwnerPlan
    mine: Range
    sent: StretchTable
    arriving: StretchTable
    places: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class CutSwap:
    """One-hop all-reduce with boundaries between two ranks: each sends all its values.

    Attributes:
        kernel: kernel of the quantization.
        table, sums: the slices to encode, and the slices to sum.
        gives: bytes to each rank, and equally from it.
        places: bytes for sent and for received payloads.
    """

    kernel: PlannedKernel
    table: StretchTable
    sums: StretchTable
    gives: Splits
    places: tuple[int, ...]


def plan_cut(
    tensor: Tensor, codecs: Sequence[Codec], how: Reduction
) -> CutAllReduce | CutSwap | None:
    """Plan the sum of ``tensor``, which has cuts; None if a codec lacks such kernels.

    ``codecs``: one for each quantization.
    """
    device, me, ranks = tensor.device, how.group.rank, how.group.size
    kernels = [each for each in (codec.planned(device) for codec in codecs) if each is not None]
    if len(kernels) < len(codecs):
        return None
    if len(codecs) == 1:
        rows = stretches(0, tensor.numel(), how.cuts)
        swapped, nbytes = _laid_out(rows, 0, 0, codecs[0], tensor.dtype)
        gives = Splits([0 if rank == me else nbytes for rank in range(ranks)])
        table, sums = kernels[0].table(swapped), kernels[0].table(swapped, sums=True)
        return CutSwap(kernels[0], table, sums, gives, places_of(nbytes, nbytes))
    chunks = chunk_ranges(tensor.numel(), ranks)
    every = [stretches(*chunk, how.cuts) for chunk in chunks]
    wide = torch.float32
    slot = max(_laid_out(row, 0, 0, codecs[1], wide)[1] for row in every)
    sent, _ = _laid_out(every[me], 0, chunks[me][0], codecs[1], wide)
    arriving = [
        one
        for rank, row in enumerate(every)
        for one in _laid_out(row, rank * slot, 0, codecs[1], wide)[0]
    ]
    return CutAllReduce(
        (kernels[0], kernels[1]),
        even_plan(tensor.numel(), chunks[0][1], ranks),
        chunks[me],
        kernels[1].table(sent),
        kernels[1].table(arriving),
        places_of(slot, ranks * slot),
    )


def _laid_out(
    rows: Sequence[Range], payload: int, begin: int, codec: Codec, dtype: torch.dtype
) -> tuple[list[PlannedStretch], int]:
    """Lay out payloads for ``rows`` from byte ``payload`` on; return the slices and all bytes."""
    sizes = [codec.wire_nbytes(high - low, dtype) for low, high in rows]
    places = accumulate(sizes, initial=payload)
    made = [
        PlannedStretch(low - begin, high - low, place, low - begin)
        for (low, high), place in zip(rows, places, strict=False)
    ]
    return made, sum(sizes)


def cut_all_reduce(
    tensor: Tensor, plan: CutAllReduce, codecs: Sequence[Codec], how: Reduction
) -> Steps[None]:
    """1 sum this rank's chunk (``sum_at_owners``), 2 encode it, 3 all-gather, 4 decode all."""
    group, meter, kept = how.group, how.meter, how.owner_residual
    (first, second), own = plan.kernels, tensor[slice(*plan.mine)]
    # 1
    buffer, total = None, kept if isinstance(kept, Tensor) else own
    if not isinstance(kept, Tensor) and (kept is not None or own.dtype != torch.float32):
        buffer, total = POOL.take_fp32(own.numel(), own.device)
        if kept is not None:
            kept.unpack(total)
    only = Reduction(codecs[0], group, meter, how.cuts, residual=how.residual)
    exchange = exchange_of(plan.owners, first, codecs[0], tensor, only)
    yield from sum_at_owners(tensor, total, exchange, first, only, None if kept is None else total)
    # 2
    room, (payload, gathered) = room_of(plan.places, tensor.device)
    with meter.coding():
        show_overflow(total, tensor.dtype)
        second.encode(plan.sent, total, payload)
    # 3
    yield chained_gather.all_gather(gathered, payload, group, meter)
    # 4
    with meter.coding():
        second.decode(plan.arriving, gathered, tensor)
        if kept is not None:
            settle(total, own)
        if isinstance(kept, QuantizedResidual):
            kept.pack(total)
    POOL.give(room, buffer)


def cut_swap(tensor: Tensor, plan: CutSwap, how: Reduction) -> Steps[None]:
    """1 encode and decode this rank's values, 2 exchange payloads, 3 add the other rank's values.

    Both ranks add the same two decoded tensors (``all_reduction._pair``).
    """
    group, meter, kernel = how.group, how.meter, plan.kernel
    buffer, total, residual, wide = None, tensor, how.residual, None
    if tensor.dtype != torch.float32:
        buffer, total = POOL.take_fp32(tensor.numel(), tensor.device)
    kept = residual if isinstance(residual, QuantizedResidual) else None
    if kept is not None:  # cuts may lie inside the residual's blocks
        wide, values = POOL.take_fp32(tensor.numel(), tensor.device)
        residual = kept.unpack(values)
    room, (sent, received) = room_of(plan.places, tensor.device)
    # 1
    with meter.coding():
        kernel.encode(plan.table, tensor, sent, residual)
        kernel.decode(plan.table, sent, total)
        if kept is not None and isinstance(residual, Tensor):
            kept.pack(residual)
    # 2
    yield transport.all_to_all(received, sent, plan.gives, plan.gives, group, meter)
    # 3
    with meter.coding():
        kernel.sum(plan.sums, received, total, group.size, group.rank, total)
        if buffer is not None:
            tensor.copy_(total)
    POOL.give(buffer, wide, room)
