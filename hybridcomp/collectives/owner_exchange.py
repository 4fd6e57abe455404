"""Exchange the stretches of an owner plan in one launch a step, however many ranks there are.

For ranges with one owner each and codecs with kernels for the stretches of a plan
(``codecs.launches.PlannedKernel``): bytes and bits of ``wire.exchanges`` and of the second hop of
``owner_reduction``. What does not depend on the values is worked out once for each rank of a plan,
and lies on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec, PlannedKernel
from hybridcomp.codecs.launches import PlannedStretch, StretchTable
from hybridcomp.codecs.quantized_residual import BLOCK, QuantizedResidual
from hybridcomp.collectives.fused import places_of, room_of
from hybridcomp.collectives.owner_plan import OwnerPlan, cut_at_chunks, plan_of
from hybridcomp.collectives.wire import (
    POOL,
    OwnedRange,
    Range,
    Reduction,
    Splits,
    Steps,
    Transfer,
    stretches,
    transport,
)


@dataclass(frozen=True, eq=False)
class OwnerExchange:
    """One all-to-all of a plan, as one rank takes part in it.

    Attributes:
        gives, takes: bytes to and from each rank.
        places: of the buffers of both, in one allocation.
        outgoing, incoming: stretches that are encoded, and that are summed or decoded.
        in_blocks: whether stretches of values begin at blocks of a residual of few bits.
        stays: sums that this rank made and owns: ``[start, stop)`` in its chunk, and where they
            begin in the tensor of its sums.
    """

    gives: Splits
    takes: Splits
    places: tuple[int, ...]
    outgoing: StretchTable
    incoming: StretchTable
    in_blocks: bool = True
    stays: tuple[tuple[Range, int], ...] = ()


@dataclass(frozen=True)
class _Context:
    """Rank, codec, dtype, device and cuts that an exchange is made for."""

    me: int
    ranks: int
    codec: Codec
    dtype: torch.dtype
    device: torch.device
    cuts: tuple[int, ...]

    def nbytes(self, numel: int) -> int:
        return self.codec.wire_nbytes(numel, self.dtype)


def shards_as_plan(
    numel: int, chunk: int, cuts: Sequence[Sequence[int]], ranks: int
) -> tuple[OwnerPlan, tuple[int, ...]]:
    """Return the direct plan of shards of ``chunk`` elements, the last ones shorter, and its cuts.

    ``cuts``: positions in the shard of each rank.
    """
    edges = [min(rank * chunk, numel) for rank in range(ranks + 1)]
    shards = tuple(OwnedRange(*edge, (rank,)) for rank, edge in enumerate(pairwise(edges)))
    whole = tuple(rank * chunk + cut for rank, row in enumerate(cuts) for cut in row)
    return replace(plan_of(shards, ranks), kind="direct", prepared={}), whole


def exchange_of(
    plan: OwnerPlan, kernel: PlannedKernel, codec: Codec, like: Tensor, via: Transfer
) -> OwnerExchange:
    """Return the exchange after which the sums of ``plan`` are at their owners.

    In a direct plan each rank sends the values of all runs, in a balanced one the sums of its
    chunk. ``like`` has the dtype and device of what is encoded. Made at the first call. Runs of a
    direct plan are cut at the cuts of ``via``, those of a balanced one are not.
    """
    key = (codec, via.group.rank, like.dtype, like.device, tuple(via.cuts))
    found: OwnerExchange | None = plan.prepared.get(key)
    if found is None:
        context = _Context(
            via.group.rank, via.group.size, codec, like.dtype, like.device, tuple(via.cuts)
        )
        make = _direct if plan.kind == "direct" else _balanced
        found = plan.prepared[key] = make(plan, kernel, context)
    return found


def _direct(plan: OwnerPlan, kernel: PlannedKernel, of: _Context) -> OwnerExchange:
    mine, others = plan.sums_of(of.me), []
    incoming, slot = [], 0
    rows = [(run, edge) for run in plan.runs for edge in stretches(run.start, run.stop, of.cuts)]
    for run, (low, high) in rows:
        if run.ranks == (of.me,):
            place = mine.place_of(run.start) + low - run.start
            incoming.append(PlannedStretch(low, high - low, slot, place))
            slot += of.nbytes(high - low)
        else:
            others.append((run.ranks[0], low, high - low))
    gives, outgoing = _laid_out(others, of)
    takes = Splits([0 if rank == of.me else slot for rank in range(of.ranks)])
    return OwnerExchange(
        gives,
        takes,
        places_of(gives.total, takes.total),
        kernel.table(outgoing),
        kernel.table(incoming, sums=True),
        all(low % BLOCK == 0 for _, (low, _) in rows),
    )


def _balanced(plan: OwnerPlan, kernel: PlannedKernel, of: _Context) -> OwnerExchange:
    mine, start = plan.sums_of(of.me), plan.even[of.me].start
    sent, come, stays = [], [], []
    for part in cut_at_chunks(plan.runs, of.ranks):
        owner = part.ranks[0]
        if part.source == of.me == owner:
            here = (part.start - start, part.stop - start)
            stays.append((here, mine.place_of(part.start)))
        elif part.source == of.me:
            sent.append((owner, part.start - start, part.numel))
        elif owner == of.me:
            come.append((part.source, mine.place_of(part.start), part.numel))
    gives, outgoing = _laid_out(sent, of)
    takes, arriving = _laid_out(come, of)
    incoming = [PlannedStretch(0, one.numel, one.payload, one.values) for one in arriving]
    return OwnerExchange(
        gives,
        takes,
        places_of(gives.total, takes.total),
        kernel.table(outgoing),
        kernel.table(incoming),
        stays=tuple(stays),
    )


def _laid_out(
    parts: Sequence[tuple[int, int, int]], of: _Context
) -> tuple[Splits, list[PlannedStretch]]:
    """Lay payloads out by rank, then in order; ``parts``: (rank, first element, elements).

    Returns the bytes by rank, and a stretch for each part.
    """
    ordered = sorted(parts, key=lambda part: part[0])  # keeps the order of one rank's
    sizes = [of.nbytes(numel) for _, _, numel in ordered]
    nbytes = [0] * of.ranks
    for (rank, _, _), size in zip(ordered, sizes, strict=True):
        nbytes[rank] += size
    starts = accumulate(sizes, initial=0)
    rows = zip(ordered, starts, strict=False)
    return Splits(nbytes), [PlannedStretch(low, numel, at) for (_, low, numel), at in rows]


def sum_at_owners(
    tensor: Tensor, sums: Tensor, exchange: OwnerExchange, kernel: PlannedKernel, how: Reduction
) -> Steps[None]:
    """1 encode all runs of other ranks, 2 all-to-all, 3 sum this rank's runs in rank order.

    A residual of few bits is fp32 in between where a run begins inside of one of its blocks.
    """
    group, meter, residual, buffer = how.group, how.meter, how.residual, None
    kept = residual if isinstance(residual, QuantizedResidual) else None
    if kept is not None and not (exchange.in_blocks and kept.in_blocks):
        buffer, wide = POOL.take_fp32(kept.numel(), tensor.device)
        residual = kept.unpack(wide)
    room, (sent, received) = room_of(exchange.places, tensor.device)
    # 1
    with meter.coding():
        kernel.encode(exchange.outgoing, tensor, sent, residual)
    # 2
    yield transport.all_to_all(received, sent, exchange.takes, exchange.gives, group, meter)
    # 3
    with meter.coding():
        ranks, me = group.size, group.rank
        kernel.sum(exchange.incoming, received, tensor, ranks, me, sums, residual)
        if kept is not None and isinstance(residual, Tensor):
            kept.pack(residual)
    POOL.give(room, buffer)


def scatter_parts(
    flat: Tensor, total: Tensor, owners: OwnerPlan, kernel: PlannedKernel, how: Reduction
) -> Steps[Tensor]:
    """Sum this rank's shard of ``flat`` into ``total``: ``sum_at_owners`` of ``shards_as_plan``."""
    exchange = exchange_of(owners, kernel, how.codec, flat, how)
    yield from sum_at_owners(flat, total, exchange, kernel, how)
    return total


def send_sums(
    total: Tensor,
    sums: Tensor,
    exchange: OwnerExchange,
    kernel: PlannedKernel,
    via: Transfer,
    feedback: bool,
) -> Steps[None]:
    """1 encode this rank's chunk ``total`` for the owners, 2 all-to-all, 3 decode into ``sums``.

    With ``feedback`` the chunk becomes the residual of this quantization.
    """
    meter = via.meter
    room, (sent, received) = room_of(exchange.places, total.device)
    # 1
    with meter.coding():
        kernel.encode(
            exchange.outgoing, None if feedback else total, sent, total if feedback else None
        )
    # 2
    yield transport.all_to_all(received, sent, exchange.takes, exchange.gives, via.group, meter)
    # 3
    with meter.coding():
        kernel.decode(exchange.incoming, received, sums)
        for (low, high), place in exchange.stays:
            sums[place : place + high - low].copy_(total[low:high])
            if feedback:
                total[low:high].zero_()
    POOL.give(room)
