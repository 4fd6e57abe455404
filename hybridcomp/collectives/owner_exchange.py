"""Exchange the slices of an owner plan in a constant number of kernel launches.

For codecs with kernels for all slices of a plan (``codecs.launches.PlannedKernel``); bytes and
results equal those of ``wire.exchanges`` and of the second hop of ``owner_reduction``. Everything
that does not depend on values is computed once per plan and rank, and kept on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import Tensor

from hybridcomp.codecs.base import Codec, PlannedKernel
from hybridcomp.codecs.launches import PlannedStretch, StretchTable
from hybridcomp.codecs.quantized_residual import BLOCK, QuantizedResidual
from hybridcomp.collectives.fused import places_of, room_of
from hybridcomp.collectives.owner_layout import CopiedPayloads, Part, SendingRank, lay_out
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
    """One rank's part in one all-to-all of a plan.

    Attributes:
        gives, takes: bytes to and from each rank.
        places: bytes for both message buffers, and for the payloads before ``copies``, in one
            allocation.
        outgoing, incoming: slices that are encoded, and slices that are summed or decoded.
        in_blocks: whether all slices begin at block borders of a few-bit residual.
        stays: sums that this rank computes and owns: ``[start, stop)`` in its chunk, and their
            start in the tensor of its sums.
        copies: copies payloads that go to several ranks into the sent message.
        again: slices that this rank owns with others: like them, it decodes its own payload.
        shared: in a direct plan, the sums of such slices, with the decoded payload as this rank's
            values.
    """

    gives: Splits
    takes: Splits
    places: tuple[int, ...]
    outgoing: StretchTable
    incoming: StretchTable
    in_blocks: bool = True
    stays: tuple[tuple[Range, int], ...] = ()
    copies: CopiedPayloads | None = None
    again: StretchTable | None = None
    shared: StretchTable | None = None

    def room(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Allocate ``(buffer to give back, this rank's payloads, received, sent bytes)``."""
        buffer, cut = room_of(self.places, like.device)
        return buffer, cut[-1], cut[0], cut[1]


def even_plan(numel: int, chunk: int, ranks: int) -> OwnerPlan:
    """Return the direct plan with a chunk of ``chunk`` elements per rank, the last ones shorter."""
    edges = [min(rank * chunk, numel) for rank in range(ranks + 1)]
    chunks = tuple(OwnedRange(*edge, (rank,)) for rank, edge in enumerate(pairwise(edges)))
    return replace(plan_of(chunks, ranks), kind="direct", prepared={})


def shards_as_plan(
    numel: int, chunk: int, cuts: Sequence[Sequence[int]], ranks: int
) -> tuple[OwnerPlan, tuple[int, ...]]:
    """Return ``even_plan`` and, as positions in the whole, ``cuts`` in the shard of each rank."""
    whole = tuple(rank * chunk + cut for rank, row in enumerate(cuts) for cut in row)
    return even_plan(numel, chunk, ranks), whole


def exchange_of(
    plan: OwnerPlan, kernel: PlannedKernel, codec: Codec, like: Tensor, via: Transfer
) -> OwnerExchange:
    """Return the exchange that brings the sums of ``plan`` to their owners.

    In a direct plan each rank sends the values of all runs, in a balanced one the sums of its
    chunk; both are cut at the cuts of ``via``. ``like`` has the dtype and device of the encoded
    values. The first call makes the exchange, later ones return it.
    """
    key = (codec, via.group.rank, like.dtype, like.device, tuple(via.cuts))
    found: OwnerExchange | None = plan.prepared.get(key)
    if found is None:
        sending = SendingRank(
            via.group.rank, via.group.size, codec, like.dtype, like.device, tuple(via.cuts)
        )
        make = _direct if plan.kind == "direct" else _balanced
        found = plan.prepared[key] = make(plan, kernel, sending)
    return found


def _cut(ranges: Sequence[OwnedRange], cuts: Sequence[int]) -> list[OwnedRange]:
    return [
        OwnedRange(low, high, owned.ranks)
        for owned in ranges
        for low, high in stretches(owned.start, owned.stop, cuts)
    ]


def _direct(plan: OwnerPlan, kernel: PlannedKernel, of: SendingRank) -> OwnerExchange:
    mine, rows = plan.sums_of(of.me), _cut(plan.runs, of.cuts)
    outgoing = [owned for owned in rows if owned.ranks != (of.me,)]
    gives, sent, copies = lay_out(
        [_part(owned.ranks, owned.start, owned.stop - owned.start, of) for owned in outgoing], of
    )
    own = {owned.start: one.payload for owned, one in zip(outgoing, sent, strict=True)}
    sums, shared, again, slot = [], [], [], 0
    for low, high, ranks in ((owned.start, owned.stop, owned.ranks) for owned in rows):
        if of.me not in ranks:
            continue
        place, numel = mine.place_of(low), high - low
        if len(ranks) == 1:
            sums.append(PlannedStretch(low, numel, slot, place))
        else:
            again.append(PlannedStretch(0, numel, own[low], place))
            shared.append(PlannedStretch(place, numel, slot, place))
        slot += of.nbytes(numel)
    takes = Splits([0 if rank == of.me else slot for rank in range(of.ranks)])
    return OwnerExchange(
        gives,
        takes,
        _places(gives, takes, copies),
        kernel.table(sent),
        kernel.table(sums, sums=True),
        all(owned.start % BLOCK == 0 for owned in rows),
        copies=copies,
        again=kernel.table(again) if again else None,
        shared=kernel.table(shared, sums=True) if shared else None,
    )


def _balanced(plan: OwnerPlan, kernel: PlannedKernel, of: SendingRank) -> OwnerExchange:
    mine, start = plan.sums_of(of.me), plan.even[of.me].start
    parts = cut_at_chunks(_cut(plan.runs, of.cuts), of.ranks)
    outgoing = [part for part in parts if part.source == of.me and not part.stays]
    gives, sent, copies = lay_out(
        [_part(part.ranks, part.start - start, part.numel, of) for part in outgoing], of
    )
    come = [part for part in parts if part.source != of.me and of.me in part.ranks]
    takes, arriving, _ = lay_out([((p.source,), mine.place_of(p.start), p.numel) for p in come], of)
    incoming = [PlannedStretch(0, one.numel, one.payload, one.values) for one in arriving]
    again = [
        PlannedStretch(0, part.numel, one.payload, mine.place_of(part.start))
        for part, one in zip(outgoing, sent, strict=True)
        if of.me in part.ranks
    ]
    stays = [
        ((part.start - start, part.stop - start), mine.place_of(part.start))
        for part in cut_at_chunks(plan.runs, of.ranks)
        if part.source == of.me and part.stays
    ]
    return OwnerExchange(
        gives,
        takes,
        _places(gives, takes, copies),
        kernel.table(sent),
        kernel.table(incoming),
        stays=tuple(stays),
        copies=copies,
        again=kernel.table(again) if again else None,
    )


def _part(ranks: tuple[int, ...], low: int, numel: int, of: SendingRank) -> Part:
    return tuple(rank for rank in ranks if rank != of.me), low, numel


def _places(gives: Splits, takes: Splits, copies: CopiedPayloads | None) -> tuple[int, ...]:
    """Return the places of ``OwnerExchange.room``; without copies payloads are the message."""
    if copies is None:
        return places_of(takes.total, gives.total)
    return places_of(takes.total, gives.total, copies.nbytes)


def sum_at_owners(
    tensor: Tensor,
    sums: Tensor,
    exchange: OwnerExchange,
    kernel: PlannedKernel,
    how: Reduction,
    begin: Tensor | None = None,
) -> Steps[None]:
    """1 encode all runs of other ranks, 2 all-to-all, 3 sum this rank's runs in rank order.

    A few-bit residual is converted to fp32 meanwhile if a run begins inside one of its blocks.
    ``begin``: fp32 start values of the sums, for a plan without shared runs; may be ``sums``.
    """
    group, meter, residual, buffer = how.group, how.meter, how.residual, None
    ranks, me = group.size, group.rank
    kept = residual if isinstance(residual, QuantizedResidual) else None
    if kept is not None and not (exchange.in_blocks and kept.in_blocks):
        buffer, wide = POOL.take_fp32(kept.numel(), tensor.device)
        residual = kept.unpack(wide)
    room, payloads, received, sent = exchange.room(tensor)
    # 1
    with meter.coding():
        kernel.encode(exchange.outgoing, tensor, payloads, residual)
        if exchange.copies is not None:
            exchange.copies.copy(payloads, sent)
    # 2
    yield transport.all_to_all(received, sent, exchange.takes, exchange.gives, group, meter)
    # 3
    with meter.coding():
        kernel.sum(exchange.incoming, received, tensor, ranks, me, sums, residual, begin)
        if exchange.again is not None and exchange.shared is not None:
            assert begin is None, "shared runs hold this rank's values where they are summed"
            kernel.decode(exchange.again, payloads, sums)
            kernel.sum(exchange.shared, received, sums, ranks, me, sums)
        if kept is not None and isinstance(residual, Tensor):
            kept.pack(residual)
    POOL.give(room, buffer)


def scatter_parts(
    flat: Tensor,
    total: Tensor,
    owners: OwnerPlan,
    kernel: PlannedKernel,
    how: Reduction,
    begin: Tensor | None = None,
) -> Steps[Tensor]:
    """Sum this rank's chunk of ``flat`` into ``total``: ``sum_at_owners`` of an ``even_plan``."""
    exchange = exchange_of(owners, kernel, how.codec, flat, how)
    yield from sum_at_owners(flat, total, exchange, kernel, how, begin)
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

    Sums that stay on this rank are left out. With ``feedback`` the chunk becomes the residual of
    this quantization.
    """
    meter, gives, takes = via.meter, exchange.gives, exchange.takes
    room, payloads, received, sent = exchange.room(total)
    # 1
    with meter.coding():
        values, left = (None, total) if feedback else (total, None)
        kernel.encode(exchange.outgoing, values, payloads, left)
        if exchange.copies is not None:
            exchange.copies.copy(payloads, sent)
    # 2
    yield transport.all_to_all(received, sent, takes, gives, via.group, meter)
    # 3
    with meter.coding():
        kernel.decode(exchange.incoming, received, sums)
        if exchange.again is not None:
            kernel.decode(exchange.again, payloads, sums)
    POOL.give(room)


def keep_sums(total: Tensor, sums: Tensor, exchange: OwnerExchange, feedback: bool) -> None:
    """Copy this rank's own slices from its chunk ``total`` into ``sums``.

    With ``feedback`` the chunk is a residual, which becomes 0 there.
    """
    for (low, high), place in exchange.stays:
        sums[place : place + high - low].copy_(total[low:high])
        if feedback:
            total[low:high].zero_()
