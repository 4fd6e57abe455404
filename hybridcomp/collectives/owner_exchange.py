"""Exchange the slices of an owner plan in a constant number of kernel launches.

It serves codecs with kernels for all slices of a plan (``codecs.launches.PlannedKernel``). Bytes
and results equal those of ``wire.exchanges`` and of the second hop in ``owner_reduction``.
Everything that does not depend on values is planned once and kept on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hybridcomp.codecs.base import PlannedKernel
from hybridcomp.codecs.launches import PlannedStretch, StretchTable
from hybridcomp.codecs.quantized_residual import BLOCK, QuantizedResidual, Residual
from hybridcomp.collectives.fused import places_of, room_of
from hybridcomp.collectives.owner_layout import CopiedPayloads, Part, SendingRank, lay_out
from hybridcomp.collectives.owner_plan import OwnerPlan, cut_at_chunks, cut_ranges
from hybridcomp.collectives.wire import transport
from hybridcomp.collectives.wire.chunking import Range
from hybridcomp.collectives.wire.encoding import POOL
from hybridcomp.collectives.wire.group import Transfer
from hybridcomp.collectives.wire.handle import Steps
from hybridcomp.collectives.wire.splits import Splits


@dataclass(frozen=True, eq=False)
class OwnerExchange:
    """One rank's part in one all-to-all of a plan.

    Attributes:
        kernel: kernels for all slices.
        gives, takes: bytes to and from each rank.
        places: bytes of the received message, of the sent message and, with ``copies``, of the
            payloads before they are copied, in one allocation.
        outgoing: slices that this rank encodes.
        incoming: slices that this rank sums (direct plan) or decodes (balanced plan).
        in_blocks: whether all slices begin at block borders of a low-bit residual.
        stays: sums that this rank computes and alone owns: ``[start, stop)`` in its chunk, and the
            start in the tensor of its sums.
        copies: copies payloads that go to several ranks into the sent message.
        again: slices that this rank owns together with other ranks. It decodes its own payload of
            them, so that all owners get the same bits.
        shared: in a direct plan, sums of the slices in ``again``, to which this rank adds its
            decoded payload instead of its exact values.
    """

    kernel: PlannedKernel
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
        """Allocate ``(buffer to give back, this rank's payloads, received bytes, sent bytes)``."""
        buffer, cut = room_of(self.places, like.device)
        return buffer, cut[-1], cut[0], cut[1]


def direct_exchange(plan: OwnerPlan, kernel: PlannedKernel, of: SendingRank) -> OwnerExchange:
    """Plan the exchange in which each rank sends its values of all runs to the runs' owners."""
    mine, rows = plan.sums_of(of.me), cut_ranges(plan.runs, of.cuts)
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
        kernel,
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


def balanced_exchange(plan: OwnerPlan, kernel: PlannedKernel, of: SendingRank) -> OwnerExchange:
    """Plan the exchange in which each rank sends the sums of its chunk to the sums' owners."""
    assert plan.even is not None, "a balanced plan"
    mine, start = plan.sums_of(of.me), plan.even.ranges[of.me].start
    parts = cut_at_chunks(cut_ranges(plan.runs, of.cuts), of.ranks)
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
        kernel,
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
    """Return ``OwnerExchange.places``; without copies the payloads are the sent message."""
    if copies is None:
        return places_of(takes.total, gives.total)
    return places_of(takes.total, gives.total, copies.nbytes)


def sum_at_owners(
    exchange: OwnerExchange,
    values: Sequence[Tensor],
    residuals: Sequence[Residual] | None,
    sums: Tensor,
    via: Transfer,
    begin: Tensor | None = None,
    in_place: bool = False,
) -> Steps[Tensor]:
    """1 encode all runs of other ranks, 2 all-to-all, 3 sum this rank's runs in rank order.

    If a run begins inside a block of a low-bit residual, the residual is fp32 during these steps.
    ``begin``: only for a plan without shared runs; other arguments are as in ``sum_parts``.
    """
    (tensor,), (residual,) = values, (None,) if residuals is None else residuals
    group, meter, kernel, buffer = via.group, via.meter, exchange.kernel, None
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
        if exchange.again is not None:
            assert begin is None, "shared runs hold this rank's values where they are summed"
            kernel.decode(exchange.again, payloads, sums)
    # 2
    yield transport.all_to_all(received, sent, exchange.takes, exchange.gives, group, meter)
    # 3
    with meter.coding():
        kernel.sum(exchange.incoming, received, tensor, ranks, me, sums, residual, begin)
        if exchange.shared is not None:
            kernel.sum(exchange.shared, received, sums, ranks, me, sums)
        if kept is not None and isinstance(residual, Tensor):
            kept.pack(residual)
    POOL.give(room, buffer)
    return sums


def send_sums(
    total: Tensor, sums: Tensor, exchange: OwnerExchange, via: Transfer, feedback: bool
) -> Steps[None]:
    """1 encode this rank's chunk ``total`` for the owners, 2 all-to-all, 3 decode into ``sums``.

    Sums that stay on this rank are copied instead. With ``feedback`` the chunk becomes the residual
    of this quantization, which is 0 where sums stay.
    """
    meter, kernel = via.meter, exchange.kernel
    room, payloads, received, sent = exchange.room(total)
    # 1
    with meter.coding():
        values, left = (None, total) if feedback else (total, None)
        kernel.encode(exchange.outgoing, values, payloads, left)
        if exchange.copies is not None:
            exchange.copies.copy(payloads, sent)
    # 2
    yield transport.all_to_all(received, sent, exchange.takes, exchange.gives, via.group, meter)
    # 3
    with meter.coding():
        kernel.decode(exchange.incoming, received, sums)
        if exchange.again is not None:
            kernel.decode(exchange.again, payloads, sums)
        for (low, high), place in exchange.stays:
            sums[place : place + high - low].copy_(total[low:high])
            if feedback:
                total[low:high].zero_()
    POOL.give(room)
