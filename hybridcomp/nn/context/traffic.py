"""Send the messages of one call of ring attention, through the channel ``cp`` or natively.

Keys and values go round the ring: their owner encodes them once, and every rank passes on the
payload that it received. In the backward pass the same payload goes round once more, since keeping
other ranks' payloads would cost the memory that sharding the sequence saves. The owner keeps its
payload between the passes, unless the payload is unencoded.

Gradients of keys and values do not go round. A running sum would have to be encoded at every hop:
with N ranks its last addend is quantized once and its first N - 1 times, each time with the whole
sum so far. Instead every rank encodes its part once and sends it to the owner, who adds the parts
in fp32. The sum then has N - 1 roundings of single parts instead of N (N - 1) / 2 (an error smaller
by sqrt(N / 2) for uncorrelated parts), and an error bound on each message also bounds the sum. With
a causal mask only the nonzero half of a part is sent: three quarters of the bytes of a ring.
Between nodes a ring would send less, since it enters each node only once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hybridcomp.channels import Channel, Channels
from hybridcomp.channels.messages.rings import record_ring, ring_of
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import Group, Meter
from hybridcomp.collectives.ring import Contents, PackedMessage, Ring
from hybridcomp.collectives.wire.handle import Pending
from hybridcomp.dimensions import Direction

#: number of receives of keys and values that are posted in advance over gloo
AHEAD = 2


@dataclass(eq=False)
class RingTraffic:
    """Send the messages of attention over ``group``, natively if ``channels`` is None."""

    channels: Channels | None
    group: ProcessGroup | None
    rank: int
    ranks: int

    def keys(self, tensors: Sequence[Tensor]) -> RingKV:
        """Pack keys and values, flat tensors of one dtype that are decoded separately."""
        numel = sum(tensor.numel() for tensor in tensors)
        codec = self.codec(numel, tensors[0].dtype, "forward")
        for tensor in tensors[:2]:
            self.sample(tensor, codec, "forward")
        ring = self.ring(codec, tensors[0].device)
        return RingKV(self, codec, ring.pack(tensors), ring.meter)

    def again(
        self, sealed: SavedKV, message: Tensor | None, pack: Callable[[], Sequence[Tensor]]
    ) -> RingKV:
        """Return keys and values for the backward pass, from ``pack`` if ``message`` is None."""
        if message is not None:
            own = PackedMessage(sealed.contents, message, sealed.nbytes, sealed.head)
            return RingKV(self, sealed.codec, own, None)
        tensors = pack()
        ring = self.ring(None, tensors[0].device)
        return RingKV(self, None, ring.pack(tensors), ring.meter)

    def gradients(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        expected: Callable[[int], Contents | None],
    ) -> Gradients:
        """Return the ``Gradients`` that send gradients to their owners.

        ``numel``: elements of a rank's keys and values together. ``expected(step)``: returns the
        sizes of the message from the rank ``step`` positions ahead; None if it sends none.
        """
        codec = self.codec(numel, dtype, "backward")
        return Gradients(self, codec, self.ring(codec, device), expected)

    @property
    def _channel(self) -> Channel | None:
        return None if self.channels is None else self.channels["cp"]

    def codec(self, numel: int, dtype: torch.dtype, direction: Direction) -> Codec | None:
        """Return the codec of a message of ``numel`` values; None for native."""
        if self._channel is None:
            return None
        codec = self._channel.codec(numel, dtype, self.group, direction)
        if codec is None:
            return None
        if direction == "forward":  # keys and values are forwarded unchanged
            return codec.split_error_budget(1, 1, result=dtype)[0]
        return codec.split_error_budget(1, self.ranks, result=dtype, exact=1)[0]

    def ring(self, codec: Codec | None, device: torch.device) -> Ring:
        """Return a ring for messages of ``codec``, with a new meter."""
        if self._channel is not None:
            return ring_of(self._channel, codec, self.group, device)
        return Ring(codec, Group.of(self.group), Meter(), device)

    def sample(self, values: Tensor, codec: Codec | None, direction: Direction) -> None:
        """Measure, in a sampling step, the error of encoding ``values``."""
        if self._channel is not None and codec is not None:
            self._channel.sample(values, codec, direction)

    def count_native(self, raw_nbytes: int, direction: Direction) -> None:
        """Record a message that torch itself sends."""
        if self._channel is not None:
            self._channel.count_native(raw_nbytes, direction)

    def record_ring_traffic(self, ring: Ring, raw_nbytes: int, direction: Direction) -> None:
        """Record the messages that went through ``ring``."""
        if self._channel is not None:
            record_ring(self._channel, ring, raw_nbytes, direction)


@dataclass(frozen=True)
class SavedKV:
    """Metadata of a packed message that is saved for the backward pass."""

    codec: Codec | None
    contents: Contents
    nbytes: Sequence[int]
    head: int


@dataclass(eq=False)
class RingKV:
    """Packed keys and values of this rank, which go round the ring once per pass.

    ``meter``: costs of packing, recorded with the first pass round the ring.
    """

    traffic: RingTraffic
    codec: Codec | None
    own: PackedMessage
    meter: Meter | None

    def seal(self) -> tuple[SavedKV, Tensor | None]:
        """Return metadata and message for the backward pass; no message without a codec."""
        own = self.own
        sealed = SavedKV(self.codec, own.contents, own.nbytes, own.head)
        return sealed, None if self.codec is None else own.message

    def around(self) -> Iterator[tuple[int, PackedMessage, Ring]]:
        """Yield the owner and the message of every rank's keys and values, this rank's first.

        1 send the held message to the next rank and receive the previous rank's, 2 let the caller
        compute with the held message meanwhile, 3 wait, and continue with the received message. The
        caller may read a message only until it requests the next one.
        """
        traffic, device = self.traffic, self.own.message.device
        ring = traffic.ring(self.codec, device)
        if self.meter is not None:
            ring.meter, self.meter = self.meter, None
        held, contents, hops = self.own, self.own.contents, traffic.ranks - 1
        moving = _Moving(ring, contents, hops)
        sent = moving.send(held)  # 1
        for step in range(traffic.ranks):
            # 2
            yield (traffic.rank - step) % traffic.ranks, held, ring
            # 3
            if sent is not None:
                came = moving.next()
                before, sent = sent, moving.send(came)  # 1
                moving.expect()
                before.wait()
                held.release()
                held = came
        held.release()
        raw_nbytes = hops * contents.numel * contents.dtype.itemsize
        traffic.record_ring_traffic(ring, raw_nbytes, "forward")


class _Moving:
    """Post the sends and receives of keys and values that go round the ring.

    Over gloo a message leaves once its receiver has posted the receive. Receives are posted one hop
    in advance, so a rank that is still computing delays no other, and forwards a received message
    at once. NCCL takes a send and a receive as one call, so receives are not posted in advance.
    """

    def __init__(self, ring: Ring, contents: Contents, hops: int) -> None:
        self._ring, self._contents = ring, contents
        self._to_send = self._to_expect = hops
        self._coming: deque[Pending[PackedMessage | None]] = deque()
        self._ahead = ring.posts_ahead
        for _ in range(AHEAD):
            self.expect()

    def expect(self) -> None:
        """Post the receive of one more message, if receives may be posted separately."""
        if self._ahead and self._to_expect:
            self._to_expect -= 1
            self._coming.append(self._ring.shift(None, 1, self._contents))

    def send(self, held: PackedMessage) -> Pending[PackedMessage | None] | None:
        """Send ``held`` to the next rank; return None if every rank has already had it."""
        if not self._to_send:
            return None
        self._to_send -= 1
        if self._ahead:
            return self._ring.shift(held, 1, None)
        both = self._ring.shift(held, 1, self._contents)
        self._coming.append(both)
        return both

    def next(self) -> PackedMessage:
        came = self._coming.popleft().wait()
        assert came is not None
        return came


class Gradients:
    """Send gradients of keys and values to their owners, and receive those of this rank's own.

    Over gloo each step's receive is posted one step in advance, the first one before keys and
    values are sent. If it were posted later, its notice to the sender would queue after the keys,
    and the gradients would wait. With two ranks, keys and gradients come from the same rank in the
    order in which their receives were posted, so nothing is posted in advance.
    """

    def __init__(
        self,
        traffic: RingTraffic,
        codec: Codec | None,
        ring: Ring,
        expected: Callable[[int], Contents | None],
    ) -> None:
        """``expected(step)``: sizes of the message from the rank ``step`` positions ahead."""
        self._traffic, self._codec, self._ring = traffic, codec, ring
        self._expected, self._raw_nbytes = expected, 0
        self._ahead = traffic.ranks > 2 and ring.posts_ahead
        self._coming: deque[Pending[PackedMessage | None]] = deque()
        self._sent: deque[Pending[PackedMessage | None]] = deque()
        if self._ahead:
            self._expect(1)

    def _expect(self, step: int) -> None:
        if step < self._traffic.ranks:
            self._coming.append(self._ring.shift(None, -step, self._expected(step)))

    def pack(self, parts: Sequence[Tensor] | None) -> PackedMessage | None:
        """Encode the gradients for one owner; None if this rank did not use the owner's keys."""
        if parts is None:
            return None
        self._traffic.sample(parts[0], self._codec, "backward")
        parcel = self._ring.pack(parts)
        self._raw_nbytes += parcel.contents.numel * parcel.contents.dtype.itemsize
        return parcel

    def send(self, step: int, parcel: PackedMessage | None) -> None:
        """Send ``parcel`` to rank - ``step``, receive from rank + ``step`` (modulo ``ranks``)."""
        if self._ahead:
            self._sent.append(self._ring.shift(parcel, -step, None))
            self._expect(step + 1)
        else:
            self._sent.append(self._ring.shift(parcel, -step, self._expected(step)))
            self._coming.append(self._sent[-1])

    def arrived(self, under_way: int) -> Iterator[PackedMessage]:
        """Wait for and yield, in order, the messages of all steps but the last ``under_way``.

        A step has no message if its sender did not use this rank's keys.
        """
        while len(self._sent) > under_way:
            came = self._coming.popleft().wait()
            self._sent.popleft().wait()
            if came is not None:
                yield came

    def add(self, parcel: PackedMessage, totals: Sequence[Tensor]) -> None:
        """Add each tensor of ``parcel`` to its flat total."""
        for index in range(len(parcel.contents.numels)):
            self._ring.add(parcel, index, totals[index])
        parcel.release()

    def record(self) -> None:
        self._traffic.record_ring_traffic(self._ring, self._raw_nbytes, "backward")
