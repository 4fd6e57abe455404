"""Encode messages before upstream posts them, and decode them once upstream has waited for them.

A payload of variable size starts with a header (``Header``) that gives its length. Upstream posts
send and receive together, so the receive buffer has room for the longest payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.wire import payload_sizes, transport
from hybridcomp.collectives.wire.encoding import POOL
from hybridcomp.collectives.wire.gathers import gather, plan_gather
from hybridcomp.collectives.wire.group import Group
from hybridcomp.collectives.wire.handle import Meter, Pending
from hybridcomp.collectives.wire.headers import HEADER_NBYTES, Header, check_match, spec_digest
from hybridcomp.collectives.wire.steps import transfer


@dataclass(frozen=True)
class Posting:
    """Codec of posted messages, and the split of a tensor over ranks that all hold it.

    Attributes:
        codec: codec of the values; None: values are sent unencoded.
        holders: group of the ranks on this rank's side that all hold the same tensor. On the
            sending side each sends one part of the tensor; on the receiving side they gather the
            payloads. None: this rank sends the whole tensor.
    """

    codec: Codec | None
    holders: Group | None = None

    @property
    def parts(self) -> int:
        """Return the number of parts in which a tensor is sent."""
        return 1 if self.holders is None else self.holders.size

    @property
    def _head(self) -> int:
        """Return the bytes of the header: 0 if the receiver knows the payload's length."""
        return HEADER_NBYTES if self.codec is not None and not self.codec.fixed_size else 0

    def part(self, values: Tensor) -> Tensor:
        """Return a view of the part of the flat ``values`` that this rank sends."""
        return values if self.holders is None else values.chunk(self.parts)[self.holders.rank]

    def encode(self, part: Tensor, meter: Meter) -> Tensor:
        """Encode ``part`` into a message, uint8."""
        if self.codec is None:
            return part.view(torch.uint8)
        room, head = self._room(part.numel(), part), self._head
        with meter.coding():
            used = self.codec.encode(part, room[head:])
        if head:
            header = Header(spec_digest(self.codec.spec), part.dtype, part.numel(), used)
            room[:head] = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
        return room[: head + used]

    def room(self, values: Tensor) -> Tensor:
        """Allocate the receive buffer (uint8) of the message that fills the flat ``values``."""
        return self._room(values.numel() // self.parts, values)

    def _room(self, numel: int, like: Tensor) -> Tensor:
        nbytes = numel * like.element_size()
        if self.codec is not None:
            nbytes = self.codec.wire_nbytes(numel, like.dtype)
        return torch.empty(self._head + nbytes, dtype=torch.uint8, device=like.device)

    def decode(self, message: Tensor, values: Tensor, src: int, meter: Meter) -> int:
        """Decode a message from global rank ``src`` into ``values``, after gathering the parts.

        Returns the bytes that the gather sent. Raises CodecError, naming both sides, if the header
        is not the expected one.
        """
        payload, gathered = self._payload(message, values, src), Meter(clock=meter.clock)
        payloads: Sequence[Tensor] = [payload]
        if self.holders is not None:
            payloads = self._gather(payload, values, gathered)
        meter.wait_s += gathered.wait_s
        meter.spans += gathered.spans
        with meter.coding():
            for part, place in zip(payloads, values.chunk(self.parts), strict=True):
                if self.codec is None:
                    place.copy_(part.view(place.dtype))
                else:
                    self.codec.decode(part, place)
        return gathered.wire_nbytes

    def _payload(self, message: Tensor, values: Tensor, src: int) -> Tensor:
        """Check the header of ``message``, if there is one, and return the payload after it."""
        if self.codec is None or not self._head:
            return message
        header = Header.unpack(bytes(message[:HEADER_NBYTES].tolist()))
        numel = values.numel() // self.parts
        check_match(header, src, numel, values.dtype, self.codec.spec)
        largest = self.codec.wire_nbytes(numel, values.dtype)
        payload_sizes.check_size(self.codec, f"rank {src}", header.nbytes, largest)
        return message[HEADER_NBYTES : HEADER_NBYTES + header.nbytes]

    def _gather(self, own: Tensor, values: Tensor, meter: Meter) -> Sequence[Tensor]:
        """Gather the payloads of all holders; ``own``: this rank's payload."""
        assert self.holders is not None
        if self.codec is None:
            out = own.new_empty(self.parts * own.numel())
            holders = self.holders
            transfer(lambda: transport.all_gather(out, own, holders, meter), meter)
            return out.chunk(self.parts)
        numels = [[values.numel() // self.parts]] * self.parts
        plan = plan_gather(numels, self.codec, values.dtype, own.device, self.holders)
        room = plan.room()  # over gloo the payload follows its size
        room.buffer[room.head : room.head + own.numel()].copy_(own)
        room.nbytes = [own.numel()]
        steps = gather(room, plan, self.holders, meter)
        rows, _ = Pending(steps, meter, async_op=False).wait()
        POOL.give(room.buffer)
        return [payload for (payload,) in rows]
