"""Encode one exchange's payloads of variable size, and exchange their sizes.

Sizes precede the payloads in the same message (over gloo between CPUs), stay on a device
(``payload_sizes``), or travel ahead in a separate message.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.wire import payload_sizes, transport
from hybridcomp.collectives.wire.batched_kernels import encode_at_once
from hybridcomp.collectives.wire.encoding import POOL, EncodeRequest, encode_job, encode_sum
from hybridcomp.collectives.wire.exchange_plan import ExchangePlan, Payloads
from hybridcomp.collectives.wire.group import Group
from hybridcomp.collectives.wire.handle import Meter, Steps
from hybridcomp.collectives.wire.splits import Splits

#: bytes to and from each rank, and for each source the bytes of each of its payloads
Sizes = tuple[Splits, Splits, list[list[int]]]


class Varying:
    """Encoder of the payloads of one exchange whose sizes vary with the values."""

    def __init__(self, plan: ExchangePlan) -> None:
        self.plan = plan
        # sizes of the jobs, followed by sizes of incoming payloads
        self._words: Tensor | None = None

    def encode(self, jobs: Sequence[EncodeRequest]) -> Payloads:
        """Encode each job, and copy its payload for further destinations."""
        return self._encode_late(jobs) if self.plan.is_late else self._encode_ahead(jobs)

    def _encode_ahead(self, jobs: Sequence[EncodeRequest]) -> Payloads:
        """Encode payloads into the message without gaps, in the order in which they are sent."""
        plan, encoded = self.plan, dict[int, Tensor]()
        encode, position = encode_sum if plan.settles_later else encode_job, 0
        out = POOL.take(plan.gives.total, plan.device)
        for row, head in zip(plan.rows, plan.heads[0], strict=True):
            start, position = position, position + head
            for job in row:
                if job in encoded:
                    used = encoded[job].numel()
                    out[position : position + used].copy_(encoded[job])
                else:
                    slot = out[position : position + plan.rooms[job]]
                    used = encode(plan.codec, jobs[job], slot, plan.dtype)
                    assert used <= plan.rooms[job], f"{plan.codec} wrote more than its wire_nbytes"
                    encoded[job] = slot[:used]
                position += used
            if head:
                payload_sizes.write_head(out[start:], [encoded[job].numel() for job in row])
        in_order = [encoded[job] for job in range(len(jobs))]
        return Payloads(in_order, [out], out[:position], plan.settles_later)

    def _encode_late(self, jobs: Sequence[EncodeRequest]) -> Payloads:
        """Encode into slots of the payloads' largest size; sizes stay on the device."""
        plan = self.plan
        out = POOL.take(sum(plan.rooms), plan.device)
        encoded = list(torch.split(out[: sum(plan.rooms)], plan.rooms))
        counts = sum(map(len, plan.arriving))
        words = torch.empty(len(jobs) + counts, dtype=torch.int64, device=plan.device)
        kernel, sizes = plan.varying if len(jobs) > 1 else None, words[: len(jobs)]
        if kernel is None or not encode_at_once(kernel, jobs, encoded, plan.dtype, sizes):
            for index, (job, slot) in enumerate(zip(jobs, encoded, strict=True)):
                encode_job(plan.codec, job, slot, plan.dtype, sizes[index : index + 1])
        self._words = words
        return Payloads(encoded, [out], out[: sum(plan.rooms)], False)

    def exchange_sizes(self, sent: Payloads, group: Group, meter: Meter) -> Steps[Sizes]:
        """Return the bytes to send and to receive, after a message with the sizes if needed."""
        plan = self.plan
        if plan.sizes_in_front:
            return self._gives(sent), plan.takes, plan.arriving
        counts, gives = ([len(row) for row in rows] for rows in (plan.arriving, plan.rows))
        order = list(chain(*plan.rows))
        if self._words is None:
            sizes = [sent.encoded[job].numel() for job in order]
            mine = torch.tensor(sizes, dtype=torch.int64, device=plan.device)
            theirs = torch.empty(sum(counts), dtype=torch.int64, device=plan.device)
            yield transport.all_to_all(theirs, mine, counts, gives, group, meter)
            flat = theirs.tolist()
        else:
            known = len(sent.encoded)
            mine, theirs = _in_order(self._words[:known], order), self._words[known:]
            message = transport.all_to_all(theirs, mine, counts, gives, group, meter)
            found = yield from payload_sizes.SIZES.fetch(self._words, message, group)
            flat = found[known:]
            sent.encoded = [s[:n] for s, n in zip(sent.encoded, found[:known], strict=True)]
            _bring_together(sent, order)
        ends = list(accumulate(counts))
        arriving = [flat[end - count : end] for end, count in zip(ends, counts, strict=True)]
        payload_sizes.check_sizes(plan.codec, arriving, plan.arriving, group)
        return self._gives(sent), Splits([sum(row) for row in arriving]), arriving

    def _gives(self, sent: Payloads) -> Splits:
        rows = zip(self.plan.heads[0], self.plan.rows, strict=True)
        return Splits([head + sum(sent.encoded[job].numel() for job in row) for head, row in rows])


def _in_order(words: Tensor, order: Sequence[int]) -> Tensor:
    """Return the ``words`` of the jobs in the ``order`` in which they are sent."""
    if list(order) == list(range(len(words))):
        return words
    return torch.cat([words[job : job + 1] for job in order])


def _bring_together(sent: Payloads, order: Sequence[int]) -> None:
    """Copy payloads into one buffer without gaps, in ``order``, for the message.

    The buffers with the payloads' slots, which have the largest size, are given back to the pool.
    """
    if len(order) < 2:
        sent.leaving = sent.encoded[order[0]] if order else sent.leaving[:0]
        return
    leaving = [sent.encoded[job] for job in order]
    nbytes = [payload.numel() for payload in leaving]
    buffer, sent.leaving = POOL.take_bytes(sum(nbytes), leaving[0].device)
    torch.cat(leaving, out=sent.leaving)
    moved = dict(zip(order, torch.split(sent.leaving, nbytes), strict=True))
    sent.encoded = [moved[job] for job in range(len(sent.encoded))]
    POOL.give(*sent.buffers)
    sent.buffers = [buffer]


def cut_payloads(
    buffer: Tensor,
    rooms: Sequence[int],
    heads: Sequence[int],
    nbytes: Sequence[Sequence[int]],
    codec: Codec,
    group: Group,
) -> list[list[Tensor]]:
    """Return the payloads of every rank, views of ``buffer``; rank r has ``rooms[r]`` bytes of it.

    ``nbytes``: the payloads' sizes; if ``heads`` state the sizes, their maximum. Raises CodecError
    if a head states a size that ``codec`` never produces.
    """
    messages = torch.split(buffer, list(rooms))
    if any(heads):
        most = nbytes
        pairs = zip(messages, most, strict=True)
        nbytes = [payload_sizes.read_head(message, len(row)) for message, row in pairs]
        payload_sizes.check_sizes(codec, nbytes, most, group)
    rows = []
    for message, head, found in zip(messages, heads, nbytes, strict=True):
        if not head and list(found) == [message.numel()]:
            rows.append([message])
            continue
        rest = message.numel() - head - sum(found)
        rows.append(list(torch.split(message, [head, *found, rest])[1:-1]))
    return rows
