"""Gather the payloads of every rank on all ranks, for all-gather and the end of all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.wire import payload_sizes, relays, transport
from hybridcomp.collectives.wire.cuts import Range
from hybridcomp.collectives.wire.encoding import POOL, encode_values, first
from hybridcomp.collectives.wire.exchanges import cut_payloads
from hybridcomp.collectives.wire.group import Transfer
from hybridcomp.collectives.wire.handle import Steps


@dataclass
class Slots:
    """Payloads in slots that follow each other in ``buffer``, behind ``head`` bytes.

    ``nbytes``: of the slots. They are as long as their payloads or, where ``words`` (int64, one for
    each, on the device) holds the sizes, as long as these could be.
    """

    buffer: Tensor
    nbytes: list[int]
    words: Tensor | None = None
    head: int = 0


def encode_all(
    codec: Codec,
    stretches: Sequence[Tensor],
    room: Slots,
    dtype: torch.dtype,
    places: Sequence[Range] = (),
) -> None:
    """Encode ``stretches`` as ``dtype`` into the empty ``room``, one after the other.

    ``places``: of the stretches in the message, for a codec ``against`` earlier values.
    """
    each = codec.each(room.buffer.device) if len(stretches) > 1 else None
    if each is not None:
        room.nbytes = [codec.wire_nbytes(values.numel(), dtype) for values in stretches]
        slots = torch.split(room.buffer[room.head : room.head + sum(room.nbytes)], room.nbytes)
        each.encode([values.to(dtype) for values in stretches], slots)
        return
    if payload_sizes.SIZES.stay(codec, room.buffer.device):
        room.words = room.buffer.new_empty(len(stretches), dtype=torch.int64)
    position = room.head
    for index, values in enumerate(stretches):
        most = codec.wire_nbytes(values.numel(), dtype)
        word = None if room.words is None else room.words[index : index + 1]
        slot = room.buffer[position : position + most]
        one = codec.part(*places[index]) if places else codec
        room.nbytes.append(encode_values(one, values.to(dtype), slot, word))
        position += room.nbytes[-1]


def decode_all(codec: Codec, payloads: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """Decode each of ``payloads`` into its ``out``; all of these are of one dtype."""
    each = codec.each(out[0].device) if len(out) > 1 else None
    if each is not None:
        each.decode(payloads, out)
        return
    for payload, values in zip(payloads, out, strict=True):
        codec.decode(payload, values)


def _payload_nbytes(
    codec: Codec, dtype: torch.dtype, numels: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Return the largest bytes of each payload, by rank; a row object is computed only once."""
    known = {
        id(row): [codec.wire_nbytes(numel, dtype) for numel in row]
        for row in {id(row): row for row in numels}.values()
    }
    return [known[id(row)] for row in numels]


def _heads(numels: Sequence[Sequence[int]], in_front: bool) -> list[int]:
    return [payload_sizes.head_nbytes(len(row)) if in_front else 0 for row in numels]


def gather(
    own: Slots, numels: Sequence[Sequence[int]], dtype: torch.dtype, via: Transfer
) -> Steps[tuple[list[list[Tensor]], Tensor]]:
    """All-gather the payloads of every rank: ``(payloads by rank, buffer to give back)``.

    Args:
        own: the encoded payloads of this rank, in their ``gather_room``.
        numels: by rank, the elements encoded in each of its payloads.

    Every rank's slot is as long as the longest. Variable-size codecs exchange the sizes first,
    where these do not stand in front of the payloads.
    """
    codec, group = via.codec, via.group
    me, world_size = group.rank, len(numels)
    found = _payload_nbytes(codec, dtype, numels)
    in_front = payload_sizes.in_front(codec, own.buffer.device, group)
    heads = _heads(numels, in_front)
    if in_front:
        return (yield from _gather_uneven(own, found, heads, via))
    if not codec.fixed_size:
        found = yield from _gather_sizes(own, numels, via)
    slot = max(sum(row) for row in found)
    payload, together = own.buffer, None
    if own.words is not None and len(own.nbytes) > 1:
        payload = together = POOL.take(slot, payload.device)
        parts = zip(torch.split(own.buffer[: sum(own.nbytes)], own.nbytes), found[me], strict=True)
        torch.cat([part[:size] for part, size in parts], out=payload[: sum(found[me])])
    buffer = POOL.take(world_size * slot, payload.device)
    wire = first(buffer, world_size * slot)
    yield relays.all_gather(wire, first(payload, slot), group, via.meter)
    POOL.give(together)
    return cut_payloads(wire, [slot] * world_size, heads, found), buffer


def _gather_uneven(
    own: Slots, most: Sequence[Sequence[int]], heads: Sequence[int], via: Transfer
) -> Steps[tuple[list[list[Tensor]], Tensor]]:
    """Gather payloads with their sizes in front; ``most``: the largest possible sizes."""
    me, used = via.group.rank, own.head + sum(own.nbytes)
    if own.head:
        payload_sizes.write_head(own.buffer, own.nbytes)
    rooms = [head + sum(row) for head, row in zip(heads, most, strict=True)]
    rooms[me] = used
    buffer = POOL.take(sum(rooms), own.buffer.device)
    wire = buffer[: sum(rooms)]
    yield transport.all_gather_uneven(wire, own.buffer[:used], rooms, via.group, via.meter)
    return cut_payloads(wire, rooms, heads, most), buffer


def _gather_sizes(
    own: Slots, numels: Sequence[Sequence[int]], via: Transfer
) -> Steps[list[list[int]]]:
    """Exchange the sizes of all ranks' payloads; return them by rank."""
    world_size, device = len(numels), own.buffer.device
    most = max(len(row) for row in numels)
    theirs = torch.empty(world_size * most, dtype=torch.int64, device=device)
    missing = [0] * (most - len(own.nbytes))
    if own.words is None:
        mine = torch.tensor([*own.nbytes, *missing], dtype=torch.int64, device=device)
        yield relays.all_gather(theirs, mine, via.group, via.meter)
        flat = theirs.tolist()
    else:
        mine = torch.cat([own.words, own.words.new_zeros(len(missing))]) if missing else own.words
        message = relays.all_gather(theirs, mine, via.group, via.meter)
        flat = yield from payload_sizes.SIZES.fetch(theirs, message, via.group)
    return [flat[most * rank :][: len(row)] for rank, row in enumerate(numels)]


def gather_room(
    numels: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device, via: Transfer
) -> Slots:
    """Take a buffer for this rank's payloads in ``gather``; the caller gives it back.

    As long as any rank's may be: where sizes travel ahead, all slots are equally long.
    """
    heads = _heads(numels, payload_sizes.in_front(via.codec, device, via.group))
    most = max(map(sum, _payload_nbytes(via.codec, dtype, numels)))
    return Slots(POOL.take(max(heads) + most, device), [], head=heads[via.group.rank])
