"""Exchange payloads between ranks: encode, all-to-all the bytes, return views of the payloads.

Long messages are cut into rounds, so that coding one overlaps with sending the others. A row is the
list of stretches that a rank sends or sums. The rows of all ranks are cut into equally many rounds,
each with its share of every row, so that all links stay busy. The cuts depend on the rows alone,
which all ranks know, and lie between blocks of the codec: values and residuals are those of the
whole message, and so are the bytes if the codec is of fixed size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.wire import payload_sizes, transport
from hybridcomp.collectives.wire.cuts import SEGMENT_ALIGN, Range, cut_rows
from hybridcomp.collectives.wire.encoding import (
    POOL,
    EncodeRequest,
    encode_job,
    encode_jobs,
    encode_sum,
    settle_job,
)
from hybridcomp.collectives.wire.group import Group, Transfer
from hybridcomp.collectives.wire.handle import UNDER_WAY, Meter, Steps
from hybridcomp.errors import CodecError

#: Elements of the longest row in one round, and of half a row where that is less: one message
#: alone leaves the link idle between its hops, but every round costs half a millisecond.
#: (native time / byte ratio) / time of an all-reduce of fp32, two ranks at 1 Gb/s, load 1.5
#: (``scripts/bench/bench_netlab.py --rounds --megabytes N`` at commit fe690ca):
#:
#:                   64 Ki  128 Ki  256 Ki  512 Ki    1 Mi    2 Mi    4 Mi   whole
#:     64 MB  8 bits   0.86    0.89   0.93    0.96    0.96    0.95    0.94    0.85
#:            4 bits   0.48    0.78   0.81    0.90    0.91    0.96    0.86    0.76
#:     16 MB  8 bits   0.63    0.77   0.85    0.92    0.91                    0.80
#:            4 bits   0.34    0.50   0.74    0.78    0.78                    0.69
#:     4 MB   8 bits   0.52    0.69   0.69                                    0.74
#:            4 bits   0.33    0.34   0.59                                    0.56
ROUND, HALF = 1 << 20, 1 << 18


def round_count(longest: int, codecs: Sequence[Codec], device: torch.device, group: Group) -> int:
    """Return the number of rounds of a message; 1 for short ones, which are faster whole.

    ``longest``: elements of its longest row; ``codecs``: all that encode the rows. On GPUs messages
    stay whole, as a launch costs more than coding a round.
    """
    if longest < 2 * HALF or device.type != "cpu":
        return 1
    scale = max(codec.round_scale for codec in codecs)
    count = max(longest // (scale * ROUND), 2 if longest >= 2 * scale * HALF else 1)
    if count == 1:
        return 1
    return count if all(_may_be_cut(codec, device, group) for codec in codecs) else 1


def rounds(
    rows: Sequence[Sequence[Range]], codecs: Sequence[Codec], device: torch.device, group: Group
) -> list[list[list[Range]]]:
    """Cut ``rows`` into rounds, each with its share of every row; into one if that is faster."""
    longest = max(sum(stop - start for start, stop in row) for row in rows)
    return cut_rows(rows, round_count(longest, codecs, device, group))


def _may_be_cut(codec: Codec, device: torch.device, group: Group) -> bool:
    """Return whether rounds keep the result, and need no separate messages with their sizes."""
    if codec.fixed_size:
        return True
    return SEGMENT_ALIGN % codec.segment == 0 and payload_sizes.in_front(codec, device, group)


@dataclass
class Payloads:
    """Views into the wire buffers of one exchange, valid until ``release``."""

    received: list[list[Tensor]]  # by group rank, then in the order of that rank's jobs
    encoded: dict[EncodeRequest, Tensor]  # this rank's payloads
    buffers: list[Tensor] = field(default_factory=list)

    def release(self) -> None:
        """Give the wire buffers back."""
        POOL.give(*self.buffers)


def exchange(
    jobs: Sequence[Sequence[EncodeRequest]],
    numels: Sequence[Sequence[int]],
    dtype: torch.dtype,
    device: torch.device,
    via: Transfer,
) -> Steps[Payloads]:
    """Encode jobs and exchange their payloads in an all-to-all.

    Args:
        jobs: per group rank, the jobs to send there; empty for this rank itself.
        numels: per group rank, the elements of each job that comes from there.
        dtype: of the encoded values, on all ranks.

    1 encode every job once, into slots that follow each other by destination
    2 variable-size codecs: exchange the sizes, where they do not stand in front of the payloads
    3 exchange the bytes; on a CPU decode this rank's jobs and settle residuals meanwhile
    """
    codec, group, meter = via.codec, via.group, via.meter
    # 1
    late = in_front = False
    heads = [[0] * len(jobs), [0] * len(numels)]
    if not codec.fixed_size:
        late = payload_sizes.SIZES.stay(codec, device)
        in_front = payload_sizes.in_front(codec, device, group)
    if in_front:
        heads = [[payload_sizes.head_nbytes(len(row)) for row in rows] for rows in (jobs, numels)]
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
    wire, source = recv_buffer[: sum(out_splits)], sent.buffers[-1][: sum(in_splits)]
    message = transport.all_to_all(wire, source, out_splits, in_splits, group, meter)
    if device.type == "cpu":
        yield UNDER_WAY  # on every rank, whatever it sends, so that all keep the same order
        with meter.coding():
            sent.settle(codec, dtype)
    yield message
    received = cut_payloads(wire, out_splits, heads[1], arriving)
    return Payloads(received, sent.encoded, [*sent.buffers, recv_buffer])


class _Outgoing:
    """Outgoing payloads of one exchange: encoded by ``encode`` or, sizes unknown, ``encode_late``.

    Args:
        heads: by destination, the bytes for sizes in front of the payloads.
        counts: by rank, the number of payloads that come from there.
    """

    def __init__(
        self, jobs: Sequence[Sequence[EncodeRequest]], heads: Sequence[int], counts: list[int]
    ) -> None:
        self.jobs, self.heads, self.counts = jobs, heads, counts
        self.encoded: dict[EncodeRequest, Tensor] = {}
        self.sizes: list[list[int]] = []  # by destination
        self.buffers: list[Tensor] = []  # in use; the message is at the start of the last one
        self.words: Tensor | None = None  # sizes of ``encoded``, then of incoming payloads
        self._unsettled: list[EncodeRequest] = []  # of ``encoded``, until ``settle``

    def encode(self, codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
        """Encode each job, and copy its payload for further destinations.

        On a CPU call ``settle`` later: the message leaves before this rank decodes its payloads,
        which takes as long as encoding them.
        """
        ahead = device.type == "cpu"
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
                    encode = encode_sum if ahead else encode_job
                    used = encode(codec, job, out[position : position + room], dtype)
                    assert used <= room, f"{codec} wrote more than its wire_nbytes"
                    self.encoded[job] = out[position : position + used]
                    self._unsettled += [job] if ahead else []
                self.sizes[-1].append(used)
                position += used
            if head:
                payload_sizes.write_head(out[start:], self.sizes[-1])

    def settle(self, codec: Codec, dtype: torch.dtype) -> None:
        """Decode the payloads of ``encode`` where jobs ask for it, and update the residuals."""
        for job in self._unsettled:
            settle_job(codec, job, self.encoded[job], dtype)

    def _encode_at_once(self, codec: Codec, dtype: torch.dtype, rooms: list[int]) -> bool:
        """Encode in one launch if there are several jobs and the codec can; return whether it did.

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
        """Encode into slots of the payloads' largest size; sizes stay on the device (``words``)."""
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
        self, device: torch.device, group: Group, meter: Meter
    ) -> Steps[list[list[int]]]:
        """Exchange sizes; return those of incoming payloads, by rank. After ``encode_late`` it also
        cuts ``encoded`` to the bytes used."""
        gives = [len(row) for row in self.jobs]
        if self.words is None:
            mine = torch.tensor(list(chain(*self.sizes)), dtype=torch.int64, device=device)
            theirs = torch.empty(sum(self.counts), dtype=torch.int64, device=device)
            yield transport.all_to_all(theirs, mine, self.counts, gives, group, meter)
            flat = theirs.tolist()
        else:
            known = len(self.encoded)
            mine, theirs = self._repeated(self.words[:known]), self.words[known:]
            message = transport.all_to_all(theirs, mine, self.counts, gives, group, meter)
            flat = yield from payload_sizes.SIZES.fetch(self.words, message, group)
            used, flat = flat[:known], flat[known:]
            for (job, slot), size in zip(self.encoded.items(), used, strict=True):
                self.encoded[job] = slot[:size]
            self.sizes = [[self.encoded[job].numel() for job in row] for row in self.jobs]
        ends = list(accumulate(self.counts))
        return [flat[end - count : end] for end, count in zip(ends, self.counts, strict=True)]

    def _repeated(self, words: Tensor) -> Tensor:
        """Return the ``words`` of the jobs in the order in which they are sent."""
        places = {job: index for index, job in enumerate(self.encoded)}
        order = [places[job] for job in chain(*self.jobs)]
        if len(order) == len(places):
            return words
        return torch.cat([words[index : index + 1] for index in order])

    def bring_together(self) -> None:
        """Copy payloads into one buffer without gaps, by destination, for the message."""
        payloads = [self.encoded[job] for job in chain(*self.jobs)]
        if len(payloads) > 1:
            total = sum(payload.numel() for payload in payloads)
            self.buffers.append(POOL.take(total, payloads[0].device))
            torch.cat(payloads, out=self.buffers[-1][:total])


def cut_payloads(
    buffer: Tensor,
    rooms: Sequence[int],
    heads: Sequence[int],
    nbytes: Sequence[Sequence[int]],
) -> list[list[Tensor]]:
    """Return the payloads of every rank, views of ``buffer``; rank r has ``rooms[r]`` bytes of it.

    ``nbytes``: their sizes; where the ``heads`` hold these, only their number counts. Raises
    CodecError where sizes do not fit: they come from another rank.
    """
    rows = []
    for message, head, known in zip(torch.split(buffer, list(rooms)), heads, nbytes, strict=True):
        found = payload_sizes.read_head(message, len(known)) if head else known
        if not head and list(found) == [message.numel()]:
            rows.append([message])
            continue
        rest = message.numel() - head - sum(found)
        if rest < 0 or min(found, default=0) < 0:
            raise CodecError(
                f"a message of {message.numel()} bytes states payloads of {list(found)} bytes"
            )
        rows.append(list(torch.split(message, [head, *found, rest])[1:-1]))
    return rows
