"""Gather the payloads of every rank on all ranks, for all-gather and the end of all-reduce.

``GatherPlan`` holds everything that does not depend on values, computed once for all equal
messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.wire import chained_gather, payload_sizes, transport
from hybridcomp.collectives.wire.chunking import Range
from hybridcomp.collectives.wire.encoding import POOL, EncodeRequest, encode_sum
from hybridcomp.collectives.wire.exchange_plan import PayloadPlan, fields_of
from hybridcomp.collectives.wire.group import Group, Transfer
from hybridcomp.collectives.wire.handle import Meter, Steps
from hybridcomp.collectives.wire.varying import cut_payloads


@dataclass(frozen=True, eq=False, kw_only=True)
class GatherPlan(PayloadPlan):
    """One all-gather of payloads, as one rank takes part in it.

    Attributes:
        me: this rank's group rank.
        nbytes: for each rank, the bytes of each of its payloads, the maximum if sizes vary.
        heads: for each rank, the bytes in front of its payloads for their sizes.
        slot: (maximum) bytes of all payloads of a rank, for the rank with the most.
        pieces: bytes of all payloads in the gathered buffer, and of the gap after each rank's
            payloads.
    """

    me: int
    nbytes: list[list[int]]
    heads: list[int]
    slot: int
    pieces: list[int]

    def room(self) -> Slots:
        """Take a buffer for this rank's payloads; the caller gives it back.

        It has the length of the longest rank's payloads: if sizes travel ahead, all ranks send
        equally long slots.
        """
        buffer = POOL.take(max(self.heads) + self.slot, self.device)
        return Slots(buffer, [], head=self.heads[self.me])


def plan_gather(
    numels: Sequence[Sequence[int]],
    codec: Codec,
    dtype: torch.dtype,
    device: torch.device,
    group: Group,
) -> GatherPlan:
    """Plan a gather; ``numels``: for each rank, the elements encoded in each of its payloads."""
    # a thousand ranks may all have the same row, which is computed once
    distinct = {id(row): row for row in numels}
    known = {key: [codec.wire_nbytes(n, dtype) for n in row] for key, row in distinct.items()}
    nbytes = [known[id(row)] for row in numels]
    common = fields_of(codec, dtype, device, group, sum(map(len, numels)) > 1)
    in_front = common["sizes_in_front"]
    heads = [payload_sizes.head_nbytes(len(row)) if in_front else 0 for row in numels]
    slot = max(map(sum, known.values()))
    pieces = list(chain(*([*row, slot - sum(row)] for row in nbytes)))
    return GatherPlan(**common, me=group.rank, nbytes=nbytes, heads=heads, slot=slot, pieces=pieces)


@dataclass
class Slots:
    """Payloads in consecutive slots of ``buffer``, after ``head`` bytes.

    ``nbytes``: bytes of each slot. A slot is as long as its payload; or, if ``words`` (int64 on the
    device, one per payload) holds the sizes, as long as the payload can be.
    """

    buffer: Tensor
    nbytes: list[int]
    words: Tensor | None = None
    head: int = 0


def encode_all(
    plan: GatherPlan, stretches: Sequence[Tensor], places: Sequence[Range] = ()
) -> Slots:
    """Encode the slices ``stretches`` one after the other into a new ``GatherPlan.room``.

    ``places``: positions of the slices in the message, for a codec that encodes ``against`` earlier
    values.
    """
    dtype, most, room = plan.dtype, plan.nbytes[plan.me], plan.room()
    if plan.each is not None and len(stretches) > 1:
        room.nbytes = most
        slots = torch.split(room.buffer[room.head : room.head + sum(most)], most)
        plan.each.encode([values.to(dtype) for values in stretches], slots)
        return room
    if plan.is_late:
        room.words = room.buffer.new_empty(len(stretches), dtype=torch.int64)
    if plan.varying is not None and room.words is not None and len(stretches) > 1:
        room.nbytes = most
        slots = torch.split(room.buffer[: sum(most)], most)
        plan.varying.encode([values.to(dtype) for values in stretches], slots, room.words, places)
        return room
    position = room.head
    for index, values in enumerate(stretches):
        word = None if room.words is None else room.words[index : index + 1]
        slot = room.buffer[position : position + most[index]]
        one = plan.codec.part(*places[index]) if places else plan.coder
        room.nbytes.append(encode_sum(one, EncodeRequest(values), slot, dtype, word))
        position += room.nbytes[-1]
    return room


def decode_all(plan: PayloadPlan, payloads: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """Decode ``payloads`` into ``out``, all of one dtype; in few launches if possible."""
    kernels = plan.each or plan.varying
    if kernels is not None and len(out) > 1:
        kernels.decode(payloads, out)
        return
    for payload, values in zip(payloads, out, strict=True):
        plan.coder.decode(payload, values)


def gather_values(
    plan: GatherPlan,
    values: Sequence[Tensor],
    out: Sequence[Tensor],
    via: Transfer,
    places: Sequence[Range] = (),
    ranks: Sequence[int] = (),
    here: Sequence[Tensor] = (),
) -> Steps[None]:
    """1 encode the slices ``values``, 2 all-gather, 3 decode into ``out``, by rank and slice.

    ``places``: as for ``encode_all``. ``ranks``: decode the payloads of these ranks only. ``here``:
    copies of the values, which may replace those that the codec encodes against.
    """
    group, meter = via.group, via.meter
    # 1
    start = meter.clock.begin()
    own = encode_all(plan, values, places)
    for copy, one in zip(here, values, strict=False):
        copy.copy_(one)
    meter.clock.end(meter, "codec", start)
    # 2
    payloads, gathered = yield from gather(own, plan, group, meter)
    # 3
    start = meter.clock.begin()
    rows = [payloads[rank] for rank in ranks] if ranks else payloads
    decode_all(plan, list(chain.from_iterable(rows)), out)
    meter.clock.end(meter, "codec", start)
    POOL.give(own.buffer, gathered)


def gather_slices(
    plan: GatherPlan,
    lengths: list[int],
    arriving: Sequence[Range],
    values: Tensor,
    out: Tensor,
    via: Transfer,
) -> Steps[None]:
    """Gather ``values``, in slices of ``lengths``, into the slices ``arriving`` of ``out``."""
    places = [out[start:stop] for start, stop in arriving]
    return gather_values(plan, torch.split(values, lengths), places, via)


def gather(
    own: Slots, plan: GatherPlan, group: Group, meter: Meter
) -> Steps[tuple[list[list[Tensor]], Tensor]]:
    """All-gather the payloads of every rank: ``(payloads by rank, buffer to give back)``.

    ``own``: the encoded payloads of this rank. All ranks send equally long slots.
    Variable-size codecs exchange the sizes first, unless these precede the payloads.
    """
    found, slot = plan.nbytes, plan.slot
    if plan.sizes_in_front:
        return (yield from _gather_uneven(own, plan, group, meter))
    if not plan.codec.fixed_size:
        found = yield from _gather_sizes(own, plan, group, meter)
        slot = max(map(sum, found))
    if own.words is not None and len(own.nbytes) > 1:
        _bring_together(own, found[plan.me], slot)
    buffer, wire = POOL.take_bytes(len(found) * slot, own.buffer.device)
    mine = own.buffer if own.buffer.numel() == slot else own.buffer[:slot]
    post = chained_gather.all_gather if group.hops else transport.all_gather
    yield post(wire, mine, group, meter)
    if not plan.codec.fixed_size:
        rooms = [slot] * len(found)
        return cut_payloads(wire, rooms, plan.heads, found, plan.codec, group), buffer
    views = iter(torch.split(wire, plan.pieces))
    return [list(islice(views, len(row) + 1))[:-1] for row in found], buffer


def _bring_together(own: Slots, sizes: Sequence[int], room: int) -> None:
    """Move payloads of these ``sizes`` into a buffer of ``room`` bytes, without gaps."""
    buffer = POOL.take(room, own.buffer.device)
    parts = zip(torch.split(own.buffer[: sum(own.nbytes)], own.nbytes), sizes, strict=True)
    torch.cat([part[:size] for part, size in parts], out=buffer[: sum(sizes)])
    POOL.give(own.buffer)
    own.buffer, own.nbytes, own.words = buffer, list(sizes), None


def _gather_uneven(
    own: Slots, plan: GatherPlan, group: Group, meter: Meter
) -> Steps[tuple[list[list[Tensor]], Tensor]]:
    """Gather payloads; each rank's payloads follow their sizes in one message."""
    used = own.head + sum(own.nbytes)
    if own.head:
        payload_sizes.write_head(own.buffer, own.nbytes)
    rooms = [head + sum(row) for head, row in zip(plan.heads, plan.nbytes, strict=True)]
    rooms[plan.me] = used
    buffer = POOL.take(sum(rooms), own.buffer.device)
    wire = buffer[: sum(rooms)]
    yield transport.all_gather_uneven(wire, own.buffer[:used], rooms, group, meter)
    return cut_payloads(wire, rooms, plan.heads, plan.nbytes, plan.codec, group), buffer


def _gather_sizes(
    own: Slots, plan: GatherPlan, group: Group, meter: Meter
) -> Steps[list[list[int]]]:
    """Exchange the sizes of all ranks' payloads; return them by rank."""
    rows, device = plan.nbytes, own.buffer.device
    most = max(len(row) for row in rows)
    theirs = torch.empty(len(rows) * most, dtype=torch.int64, device=device)
    missing = [0] * (most - len(own.nbytes))
    if own.words is None:
        mine = torch.tensor([*own.nbytes, *missing], dtype=torch.int64, device=device)
        yield chained_gather.all_gather(theirs, mine, group, meter)
        flat = theirs.tolist()
    else:
        mine = torch.cat([own.words, own.words.new_zeros(len(missing))]) if missing else own.words
        message = chained_gather.all_gather(theirs, mine, group, meter)
        flat = yield from payload_sizes.SIZES.fetch(theirs, message, group)
    found = [flat[most * rank :][: len(row)] for rank, row in enumerate(rows)]
    payload_sizes.check_sizes(plan.codec, found, rows, group)
    return found
