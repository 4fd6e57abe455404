"""Plan an exchange of payloads, and a sum over exchanged payloads: slots, sizes, destinations.

The same messages come at every step, so everything that does not depend on values is computed once
for all equal messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec, MultiTensorKernel
from hybridcomp.codecs.varying_pieces import PieceKernel
from hybridcomp.collectives.wire import payload_sizes
from hybridcomp.collectives.wire.encoding import Coder, coder_of
from hybridcomp.collectives.wire.group import Group
from hybridcomp.collectives.wire.splits import Splits


@dataclass(frozen=True, eq=False, kw_only=True)
class PayloadPlan:
    """The coding of payloads on one rank, the same for messages with other values.

    Attributes:
        codec, dtype, device: codec, dtype and device of the encoded values; all ranks use this
            dtype.
        coder: the codec with its kernels looked up.
        each: kernels for several payloads in one launch, if the back end has them.
        varying: kernels for all payloads of variable size at once, if their sizes stay on the
            device.
        is_late: whether the encoder leaves payload sizes on the device.
        sizes_in_front: whether payload sizes precede the payloads in the same message.
    """

    codec: Codec
    coder: Coder
    dtype: torch.dtype
    device: torch.device
    each: MultiTensorKernel | None
    varying: PieceKernel | None
    is_late: bool
    sizes_in_front: bool


def fields_of(
    codec: Codec, dtype: torch.dtype, device: torch.device, group: Group, several: bool
) -> dict[str, Any]:
    """Return the fields of a ``PayloadPlan``; ``several``: a rank codes more than one payload."""
    is_late = payload_sizes.SIZES.stay(codec, device)
    return {
        "codec": codec,
        "coder": coder_of(codec, device),
        "dtype": dtype,
        "device": device,
        "each": codec.each(device) if several else None,
        "varying": codec.pieces(device) if several and is_late else None,
        "is_late": is_late,
        "sizes_in_front": payload_sizes.in_front(codec, device, group),
    }


@dataclass(frozen=True, eq=False, kw_only=True)
class ExchangePlan(PayloadPlan):
    """One all-to-all of payloads, as one rank takes part in it.

    Attributes:
        rows: for each destination, the numbers of the jobs whose payloads go there, in order.
        rooms: for each job, the bytes of its payload; the maximum if sizes vary.
        arriving: for each source, the (maximum) bytes of each of its payloads.
        heads: for each destination, and for each source, the bytes of the sizes that precede the
            payloads.
        gives, takes: (maximum) bytes to and from each rank, including heads.
        slots: bytes of the payloads in the order in which they are sent.
        places: for each job, the number of its first slot.
        copies: for each further slot of a payload: (number of the first slot, of this slot).
        pieces: bytes of the payloads in the order in which they arrive.
        settles_later: whether this rank decodes its own payloads only once the message is posted:
            on a CPU, where decoding takes as long as encoding.
    """

    rows: list[list[int]]
    rooms: list[int]
    arriving: list[list[int]]
    heads: tuple[list[int], list[int]]
    gives: Splits
    takes: Splits
    slots: list[int]
    places: list[int]
    copies: list[tuple[int, int]]
    pieces: list[int]
    settles_later: bool


def plan_exchange(
    rows: list[list[int]],
    jobs: Sequence[int],
    numels: Sequence[Sequence[int]],
    codec: Codec,
    dtype: torch.dtype,
    device: torch.device,
    group: Group,
) -> ExchangePlan:
    """Plan an exchange.

    Args:
        rows: per group rank, the numbers of the jobs whose payloads go to it; empty for this rank.
            Every job has a destination.
        jobs: elements of each job.
        numels: per group rank, the elements of each payload that this rank receives from it.
        codec, dtype, device: codec, dtype and device of the encoded values.
    """
    rooms = [codec.wire_nbytes(numel, dtype) for numel in jobs]
    arriving = [[codec.wire_nbytes(numel, dtype) for numel in row] for row in numels]
    pieces = list(chain(*arriving))
    common = fields_of(codec, dtype, device, group, max(len(jobs), len(pieces)) > 1)
    heads = [[0] * len(rows), [0] * len(numels)]
    if common["sizes_in_front"]:
        heads = [[payload_sizes.head_nbytes(len(row)) for row in each] for each in (rows, numels)]
    order = list(chain(*rows))
    seen: dict[int, int] = {}
    copies = [
        (seen[job], slot) for slot, job in enumerate(order) if seen.setdefault(job, slot) != slot
    ]
    leaving = [[rooms[job] for job in row] for row in rows]
    gives, takes = (
        Splits([head + sum(row) for head, row in zip(of_rank, each, strict=True)])
        for of_rank, each in zip(heads, (leaving, arriving), strict=True)
    )
    return ExchangePlan(
        **common,
        rows=rows,
        rooms=rooms,
        arriving=arriving,
        heads=(heads[0], heads[1]),
        gives=gives,
        takes=takes,
        slots=[rooms[job] for job in order],
        places=[seen[job] for job in range(len(jobs))],
        copies=copies,
        pieces=pieces,
        settles_later=device.type == "cpu" and not common["is_late"],
    )


@dataclass
class Payloads:
    """Views into the wire buffers of one exchange; the caller gives ``buffers`` back to the pool.

    Attributes:
        encoded: this rank's payloads, by job.
        buffers: buffers to give back.
        leaving: the message to all ranks, in rank order.
        is_unsettled: whether the jobs' residuals still hold the encoded values, not the error.
        received: received payloads, by group rank, then in the order of that rank's jobs.
    """

    encoded: list[Tensor]
    buffers: list[Tensor]
    leaving: Tensor
    is_unsettled: bool
    received: list[list[Tensor]] = field(default_factory=list)


class SummedPart(NamedTuple):
    """A slice of the tensors to reduce.

    Attributes:
        start, stop: range of its elements.
        owners: group ranks that need its sum.
        place: start of the sum in this rank's tensor of sums, if this rank is an owner.
        source: index of the tensor that has the slice, if there are several.
    """

    start: int
    stop: int
    owners: tuple[int, ...]
    place: int = 0
    source: int = 0


@dataclass(frozen=True, eq=False)
class SumPlan:
    """One round of a reduction, as one rank takes part in it, for messages of any values.

    Attributes:
        exchange: exchange of the payloads.
        sent: the parts that this rank encodes; job i of the exchange encodes part i.
        owned: the parts that this rank sums, each with its job number or None. None: this rank is
            the sole owner and adds its values unquantized. Several owners must get the same sum, so
            each decodes its own contribution from the payload that it sends to the other owners.
        ahead: whether sums with several owners begin with this rank's payload, which it decodes
            while the message is sent: only between two ranks, where a + b equals b + a.
    """

    exchange: ExchangePlan
    sent: list[SummedPart]
    owned: list[tuple[SummedPart, int | None]]
    ahead: bool


def plan_sum(
    parts: Sequence[SummedPart],
    codec: Codec,
    dtype: torch.dtype,
    device: torch.device,
    group: Group,
) -> SumPlan:
    """Plan the sum of ``parts``, the same on all ranks; they are encoded as ``dtype``."""
    me, filled = group.rank, [part for part in parts if part.start < part.stop]
    sent = [part for part in filled if part.owners != (me,)]
    rows: list[list[int]] = [[] for _ in range(group.size)]
    for job, part in enumerate(sent):
        for rank in part.owners:
            if rank != me:
                rows[rank].append(job)
    jobs = {part: job for job, part in enumerate(sent)}
    owned = [(part, jobs.get(part)) for part in filled if me in part.owners]
    numels = [part.stop - part.start for part, _ in owned]
    incoming = [numels] * group.size
    incoming[me] = []
    lengths = [part.stop - part.start for part in sent]
    exchange = plan_exchange(rows, lengths, incoming, codec, dtype, device, group)
    return SumPlan(exchange, sent, owned, group.size == 2 and exchange.each is None)


def sent_dtype(codec: Codec, dtype: torch.dtype, wide: bool, flush: bool = False) -> torch.dtype:
    """Return the dtype as which to encode values of a message of ``dtype``.

    ``wide``: the values are fp32 at this point. A lossy codec encodes fp32 directly, which saves a
    rounding and a pass over memory. A lossless codec would need twice the bytes, for digits that
    ``dtype`` cannot hold: it sends them only on a ``flush``, since no later message will.
    """
    return torch.float32 if wide and (flush or not codec.lossless) else dtype
