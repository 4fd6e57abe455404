"""Broadcasts and reductions to one rank, for hybridcomp's own layers (``nn``).

No upstream code sends these messages: each has a ``native`` method that sends it without a codec.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import Tensor

from hybridcomp import collectives
from hybridcomp.channels.channel import Channel, Message
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import Group, Handle, Meter, Transfer, native_nbytes


@dataclass(eq=False, kw_only=True)
class Broadcast(Message[tuple[Handle, Tensor]]):
    """Broadcast ``values`` (1-D, contiguous) of group rank ``root`` to all ranks.

    Other ranks receive into their ``values``. Sending returns the handle of the pending operation
    and a tensor with the same bits on all ranks after ``wait()``: ``values``, but on the root of an
    encoded broadcast a new tensor.
    """

    values: Tensor
    root: int

    def native_nbytes(self, size: int) -> int:
        """Return the bytes that the root sends, a copy to each other rank; 0 on the other ranks."""
        if dist.get_rank(self.group) != self.root:
            return 0
        return native_nbytes.broadcast_nbytes(self.numel, self.dtype, size)

    def native(self, known: Group, meter: Meter) -> tuple[Handle, Tensor]:
        """Broadcast without a codec."""
        handle = collectives.broadcast_native(self.values, self.root, known, meter, async_op=True)
        return handle, self.values

    def send(self, channel: Channel, codec: Codec) -> tuple[Handle, Tensor]:
        """Broadcast encoded values; the root decodes its own payload too."""
        values = self.values
        known, meter = channel.group(self.group), channel.meter(values.device)
        sends = known.rank == self.root
        out = values.new_empty(self.numel) if sends else values
        if sends:
            channel.sample(
                values, codec.split_error_budget(1, 1, result=self.dtype)[0], self.direction
            )
        via = Transfer(codec, known, meter)
        handle = collectives.broadcast(
            values if sends else None, out, self.root, via, async_op=True
        )
        share = len(known.remote) / max(1, known.size - 1)
        return handle.then(partial(_record, channel, meter, self, known, share)), out


@dataclass(eq=False, kw_only=True)
class Reduce(Message[Handle]):
    """Sum ``values`` (1-D, contiguous) of all ranks into ``out`` of group rank ``root``.

    Attributes:
        out: the sum, fp32 or wider; None on ranks other than ``root``.
    """

    values: Tensor
    out: Tensor | None
    root: int

    def native_nbytes(self, size: int) -> int:
        """Return the bytes of the values; 0 on the root, which sends nothing."""
        if dist.get_rank(self.group) == self.root:
            return 0
        return native_nbytes.send_nbytes(self.numel, self.dtype)

    def native(self, known: Group, meter: Meter) -> Handle:
        """Sum without a codec."""
        return collectives.reduce_native(
            self.values, self.out, self.root, known, meter, async_op=True
        )

    def send(self, channel: Channel, codec: Codec) -> Handle:
        """Encode the values for the root, which adds them in fp32; return the pending operation."""
        known, meter = channel.group(self.group), channel.meter(self.values.device)
        if known.rank != self.root:
            first = codec.split_error_budget(1, known.size, exact=1)[0]
            channel.sample(self.values, first, self.direction)
        via = Transfer(codec, known, meter)
        handle = collectives.reduce(self.values, self.out, self.root, via, async_op=True)
        share = float(self.root in known.remote)
        return handle.then(partial(_record, channel, meter, self, known, share))


def _record(
    channel: Channel, meter: Meter, message: Broadcast | Reduce, known: Group, inter: float
) -> None:
    """Record a message: bytes and time on ranks that send, only the time on the others."""
    nbytes = message.native_nbytes(known.size)
    if nbytes:
        channel.record(meter, nbytes, message.direction, inter)
    else:
        channel.state.ledger.record_time((channel.dimension, message.direction), meter)
