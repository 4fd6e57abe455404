"""Payloads between ranks: encode, exchange the bytes, hand out views of what arrived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_rank

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.wire import payload_sizes, transport
from hybridcomp.collectives.wire.buffers import POOL, first
from hybridcomp.collectives.wire.encoding import Job, Slots, encode_job, encode_jobs
from hybridcomp.collectives.wire.handle import Steps
from hybridcomp.collectives.wire.meter import Meter
from hybridcomp.collectives.wire.payload_sizes import SIZE_NBYTES


@dataclass
class Payloads:
    """Views into the wire buffers of one exchange; ``release`` ends their life."""

    received: list[list[Tensor]]  # by group rank, then in the order of that rank's jobs
    encoded: dict[Job, Tensor]  # own payloads
    buffers: list[Tensor] = field(default_factory=list)

    def release(self) -> None:
        """Give the wire buffers back."""
        POOL.give(*self.buffers)


def exchange(
    codec: Codec,
    dtype: torch.dtype,
    jobs: Sequence[Sequence[Job]],
    numels: Sequence[Sequence[int]],
    device: torch.device,
    group: ProcessGroup | None,
    meter: Meter,
) -> Steps[Payloads]:
    """All-to-all of payloads.

    Args:
        jobs: per group rank, what to send there; empty for this rank itself.
        numels: per group rank, the elements of each job that comes from there.
        dtype: what is encoded, on all ranks.

    1 encode every job once, into slots that follow each other by destination
    2 variable-size codecs: exchange the sizes, where they do not stand in front of the payloads
    3 exchange the bytes
    """
    # 1
    late = payload_sizes.SIZES.stay(codec, device)
    in_front = payload_sizes.in_front(codec, device, group)
    heads = [
        [payload_sizes.head_nbytes(len(row) * in_front) for row in rows] for rows in (jobs, numels)
    ]
    sent = _Outgoing(jobs, heads[0], [len(row) for row in numels])
    with meter.coding():
        (sent.encode_late if late else sent.encode)(codec, dtype, device)
    # 2
    if codec.fixed_size or in_front:
        arriving = [[codec.wire_nbytes(n, dtype) for n in row] for row in numels]
    else:
        arriving = yield from sent.exchange_sizes(device, group, meter)
    if late:
        sent.bring_together()
    # 3
    in_splits = [head + sum(row) for head, row in zip(heads[0], sent.sizes, strict=True)]
    out_splits = [head + sum(row) for head, row in zip(heads[1], arriving, strict=True)]
    recv_buffer = POOL.take(sum(out_splits), device)
    meter.sent_each(in_splits)
    wire, source = recv_buffer[: sum(out_splits)], sent.buffers[-1][: sum(in_splits)]
    yield from transport.all_to_all(wire, source, out_splits, in_splits, group)
    received = _cut(wire, out_splits, heads[1], arriving)
    return Payloads(received, sent.encoded, [*sent.buffers, recv_buffer])


class _Outgoing:
    """What one exchange sends: encoded by ``encode``, or by ``encode_late`` and step by step.

    Args:
        heads: by destination, the bytes for sizes in front of the payloads.
        counts: by rank, the payloads that come from there.
    """

    def __init__(
        self, jobs: Sequence[Sequence[Job]], heads: Sequence[int], counts: list[int]
    ) -> None:
        self.jobs, self.heads, self.counts = jobs, heads, counts
        self.encoded: dict[Job, Tensor] = {}
        self.sizes: list[list[int]] = []  # by destination
        self.buffers: list[Tensor] = []  # in use; what is sent stands at the start of the last
        self.words: Tensor | None = None  # sizes of ``encoded``, then of what comes

    def encode(self, codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
        """Payloads and copies of them where they are sent from."""
        rooms = [codec.wire_nbytes(job.values.numel(), dtype) for job in chain(*self.jobs)]
        out = POOL.take(sum(rooms) + sum(self.heads), device)
        self.buffers.append(out)
        if codec.fixed_size and self._encode_at_once(codec, dtype, rooms):
            return
        position = 0
        for row, head in zip(self.jobs, self.heads, strict=True):
            self.sizes.append([])
            start, position = position, position + head
            for job in row:
                if job in self.encoded:
                    used = self.encoded[job].numel()
                    out[position : position + used].copy_(self.encoded[job])
                else:
                    room = codec.wire_nbytes(job.values.numel(), dtype)
                    used = encode_job(codec, job, out[position : position + room], dtype)
                    assert used <= room, f"{codec} wrote more than its wire_nbytes"
                    self.encoded[job] = out[position : position + used]
                self.sizes[-1].append(used)
                position += used
            if head:
                payload_sizes.write_head(out[start:], self.sizes[-1])

    def _encode_at_once(self, codec: Codec, dtype: torch.dtype, rooms: list[int]) -> bool:
        """``encode`` in one launch, where there are several jobs and the codec has that.

        ``rooms``: the bytes of every payload that is sent; there are no heads.
        """
        slots = torch.split(self.buffers[-1][: sum(rooms)], rooms)
        every = list(chain(*self.jobs))
        slot_of = dict(zip(reversed(every), reversed(slots), strict=True))
        if len(slot_of) < 2 or not encode_jobs(codec, [*slot_of], [*slot_of.values()], dtype):
            return False
        for job, slot in zip(every, slots, strict=True):
            if slot is not slot_of[job]:
                slot.copy_(slot_of[job])
        self.encoded = slot_of
        sizes_of = iter(rooms)
        self.sizes = [[next(sizes_of) for _ in row] for row in self.jobs]
        return True

    def encode_late(self, codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
        """Payloads in slots of their largest size; their sizes to ``words``."""
        every = list(dict.fromkeys(chain(*self.jobs)))
        rooms = [codec.wire_nbytes(job.values.numel(), dtype) for job in every]
        out = POOL.take(sum(rooms), device)
        self.buffers.append(out)
        words = torch.empty(len(every) + sum(self.counts), dtype=torch.int64, device=device)
        for index, (job, end) in enumerate(zip(every, accumulate(rooms), strict=True)):
            self.encoded[job] = out[end - rooms[index] : end]
            encode_job(codec, job, self.encoded[job], dtype, words[index : index + 1])
        self.words = words

    def exchange_sizes(
        self, device: torch.device, group: ProcessGroup | None, meter: Meter
    ) -> Steps[list[list[int]]]:
        """The sizes of what comes, by rank. Cuts ``encoded`` to what is used, if it was not."""
        gives = [len(row) for row in self.jobs]
        meter.sent_each([SIZE_NBYTES * count for count in gives])
        if self.words is None:
            mine = torch.tensor(list(chain(*self.sizes)), dtype=torch.int64, device=device)
            theirs = torch.empty(sum(self.counts), dtype=torch.int64, device=device)
            yield from transport.all_to_all(theirs, mine, self.counts, gives, group)
            flat = theirs.tolist()
        else:
            known = len(self.encoded)
            mine, theirs = self._repeated(self.words[:known]), self.words[known:]
            message = transport.all_to_all(theirs, mine, self.counts, gives, group)
            flat = yield from payload_sizes.SIZES.fetch(self.words, message, group)
            used, flat = flat[:known], flat[known:]
            for (job, slot), size in zip(self.encoded.items(), used, strict=True):
                self.encoded[job] = slot[:size]
            self.sizes = [[self.encoded[job].numel() for job in row] for row in self.jobs]
        ends = list(accumulate(self.counts))
        return [flat[end - count : end] for end, count in zip(ends, self.counts, strict=True)]

    def _repeated(self, words: Tensor) -> Tensor:
        """``words`` of the jobs in the order in which they are sent."""
        places = {job: index for index, job in enumerate(self.encoded)}
        order = [places[job] for job in chain(*self.jobs)]
        if len(order) == len(places):
            return words
        return torch.cat([words[index : index + 1] for index in order])

    def bring_together(self) -> None:
        """Copy payloads next to each other, by destination, as a message needs them."""
        payloads = [self.encoded[job] for job in chain(*self.jobs)]
        if len(payloads) > 1:
            total = sum(payload.numel() for payload in payloads)
            self.buffers.append(POOL.take(total, payloads[0].device))
            torch.cat(payloads, out=self.buffers[-1][:total])


def _cut(
    buffer: Tensor,
    rooms: Sequence[int],
    heads: Sequence[int],
    nbytes: Sequence[Sequence[int]],
) -> list[list[Tensor]]:
    """The payloads of every rank, views of ``buffer``, in which each rank has its room.

    ``nbytes`` are the sizes, or how many there are where they stand in the ``heads``.
    """
    rows = []
    for message, head, known in zip(torch.split(buffer, list(rooms)), heads, nbytes, strict=True):
        found = payload_sizes.read_head(message, len(known)) if head else known
        if not head and list(found) == [message.numel()]:
            rows.append([message])
            continue
        rest = message.numel() - head - sum(found)
        rows.append(list(torch.split(message, [head, *found, rest])[1:-1]))
    return rows


def _payload_nbytes(
    codec: Codec, dtype: torch.dtype, numels: Sequence[Sequence[int]]
) -> list[list[int]]:
    """The most bytes of each payload, by rank. Rows that are one object are looked at once."""
    known = {
        id(row): [codec.wire_nbytes(numel, dtype) for numel in row]
        for row in {id(row): row for row in numels}.values()
    }
    return [known[id(row)] for row in numels]


def _heads(numels: Sequence[Sequence[int]], in_front: bool) -> list[int]:
    return [payload_sizes.head_nbytes(len(row)) if in_front else 0 for row in numels]


def gather(
    codec: Codec,
    dtype: torch.dtype,
    own: Slots,
    numels: Sequence[Sequence[int]],
    group: ProcessGroup | None,
    meter: Meter,
) -> Steps[tuple[list[list[Tensor]], Tensor]]:
    """All-gather the payloads of every rank: ``(payloads by rank, buffer to give back)``.

    Args:
        own: the encoded payloads of this rank, in their ``gather_room``.
        numels: by rank, the elements behind each of its payloads.

    Every rank's slot is as long as the longest. Variable-size codecs exchange the sizes first,
    where these do not stand in front of the payloads.
    """
    me, world_size = get_rank(group), len(numels)
    found = _payload_nbytes(codec, dtype, numels)
    in_front = payload_sizes.in_front(codec, own.buffer.device, group)
    heads = _heads(numels, in_front)
    if in_front:
        return (yield from _gather_uneven(own, found, heads, group, meter))
    if not codec.fixed_size:
        found = yield from _gather_sizes(own, numels, group, meter)
    slot = max(sum(row) for row in found)
    payload, together = own.buffer, None
    if own.words is not None and len(own.nbytes) > 1:
        payload = together = POOL.take(slot, payload.device)
        parts = zip(torch.split(own.buffer[: sum(own.nbytes)], own.nbytes), found[me], strict=True)
        torch.cat([part[:size] for part, size in parts], out=payload[: sum(found[me])])
    buffer = POOL.take(world_size * slot, payload.device)
    meter.sent_around(slot, me, world_size)
    wire = first(buffer, world_size * slot)
    yield from transport.all_gather(wire, first(payload, slot), group)
    POOL.give(together)
    return _cut(wire, [slot] * world_size, heads, found), buffer


def _gather_uneven(
    own: Slots,
    most: Sequence[Sequence[int]],
    heads: Sequence[int],
    group: ProcessGroup | None,
    meter: Meter,
) -> Steps[tuple[list[list[Tensor]], Tensor]]:
    """``gather`` of payloads behind their sizes; ``most``: the largest sizes that there may be."""
    me = get_rank(group)
    used = own.head + sum(own.nbytes)
    if own.head:
        payload_sizes.write_head(own.buffer, own.nbytes)
    rooms = [head + sum(row) for head, row in zip(heads, most, strict=True)]
    rooms[me] = used
    buffer = POOL.take(sum(rooms), own.buffer.device)
    meter.sent_around(used, me, len(rooms))
    wire = buffer[: sum(rooms)]
    yield from transport.all_gather_uneven(wire, own.buffer[:used], rooms, group)
    return _cut(wire, rooms, heads, most), buffer


def _gather_sizes(
    own: Slots, numels: Sequence[Sequence[int]], group: ProcessGroup | None, meter: Meter
) -> Steps[list[list[int]]]:
    """The sizes of all ranks' payloads, by rank."""
    world_size, device = len(numels), own.buffer.device
    most = max(len(row) for row in numels)
    theirs = torch.empty(world_size * most, dtype=torch.int64, device=device)
    missing = [0] * (most - len(own.nbytes))
    meter.sent_around(SIZE_NBYTES * most, get_rank(group), world_size)
    if own.words is None:
        mine = torch.tensor([*own.nbytes, *missing], dtype=torch.int64, device=device)
        yield from transport.all_gather(theirs, mine, group)
        flat = theirs.tolist()
    else:
        mine = torch.cat([own.words, own.words.new_zeros(len(missing))]) if missing else own.words
        message = transport.all_gather(theirs, mine, group)
        flat = yield from payload_sizes.SIZES.fetch(theirs, message, group)
    return [flat[most * rank :][: len(row)] for rank, row in enumerate(numels)]


def gather_room(
    codec: Codec,
    dtype: torch.dtype,
    numels: Sequence[Sequence[int]],
    device: torch.device,
    group: ProcessGroup | None,
) -> Slots:
    """A buffer for this rank's payloads in ``gather``, which the caller gives back.

    As long as any rank's may be: with sizes that travel ahead, all slots are equally long.
    """
    heads = _heads(numels, payload_sizes.in_front(codec, device, group))
    most = max(map(sum, _payload_nbytes(codec, dtype, numels)))
    return Slots(POOL.take(max(heads) + most, device), [], head=heads[get_rank(group)])
