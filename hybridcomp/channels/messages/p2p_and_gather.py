"""Messages without a sum: all-gather, all-to-all, send and receive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from hybridcomp import collectives
from hybridcomp.channels.channel import Channel, Message
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import Handle, Meter, Splits, Transfer, native_nbytes
from hybridcomp.collectives.async_p2p import Posting
from hybridcomp.collectives.wire import transport
from hybridcomp.config import BLOCK
from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.log import say_once

#: explains why a codec has no effect on posted receives, and the remedy
VARIES = (
    "receives are posted before the sender has encoded, and only gloo takes a message that is "
    "shorter than its receive; use a codec of fixed size, such as blockint or zfp"
)


@dataclass(eq=False, kw_only=True)
class AllGather(Message[Handle]):
    """Gather the shards of all ranks into ``out``; every rank decodes the same bytes.

    Attributes:
        shard: 1-D contiguous, this rank's shard; may be its part of ``out``.
        out: 1-D contiguous, equal shards in rank order.
        relative_to: the tensor whose norm the sampled error is divided by, None for ``shard``.
        async_op: return before ``out`` is complete.
        single_post: be asynchronous only if ``wait()`` posts no further message; needed where ranks
            may wait for several gathers in different orders.
    """

    shard: Tensor
    out: Tensor
    relative_to: Tensor | None = None
    async_op: bool = False
    single_post: bool = False

    def cuts(self, codec: Codec) -> Sequence[int]:
        """Return borders in the shard that ``codec`` must not cross; see ``collectives``."""
        return ()

    def native_nbytes(self, size: int) -> int:
        """Return the bytes of a ring all-gather."""
        return native_nbytes.all_gather_nbytes(self.shard.numel(), self.dtype, size)

    def nbytes_among(self, size: int, ranks: int) -> int:
        """Return the bytes of gathering the same values from ``ranks`` ranks."""
        shard = -(-size * self.shard.numel() // ranks)
        return native_nbytes.all_gather_nbytes(shard, self.dtype, ranks)

    def in_node(self, channel: Channel) -> Work | None:
        """Gather unencoded shards between pairs, which is faster inside a node; None elsewhere."""
        if channel.state.nodes is None:
            return None
        return transport.gather_in_node(self.out, self.shard, channel.group(self.group))

    def send(self, channel: Channel, codec: Codec) -> Handle:
        """Gather encoded shards; see ``collectives.all_gather``."""
        shard, cuts = self.shard, self.cuts(codec)
        (only,) = codec.split_error_budget(1, 1, result=shard.dtype)
        channel.sample(shard, only, self.direction, cuts, self.relative_to)
        known, meter = channel.group(self.group), channel.meter(shard.device)
        via = Transfer(codec, known, meter, cuts)
        async_op = self.async_op
        if self.single_post:
            # variable sizes and a second level need a second message
            async_op = async_op and codec.fixed_size and known.levels is None
        handle = collectives.all_gather(shard, self.out, via, async_op)
        nbytes = self.native_nbytes(known.size)
        return channel.recorded(handle, meter, nbytes, self.direction, known.ring)


@dataclass(eq=False, kw_only=True)
class AllToAll(Message[Handle]):
    """Exchange parts of ``values`` between all ranks.

    Attributes:
        values: a tensor of any shape, read in flat order.
        out: 1-D contiguous, of their dtype; None: allocated where there is a codec.
        in_splits, out_splits: rows to and from each rank; None: equal parts. ``send`` replaces the
            rows by numbers of elements.
        row: elements of a row.
        async_op: return before ``out`` is complete.
    """

    values: Tensor
    out: Tensor | None = None
    in_splits: Sequence[int] | Splits | None = None
    out_splits: Sequence[int] | Splits | None = None
    row: int = 1
    async_op: bool = False

    def native_nbytes(self, size: int) -> int:
        """Return the bytes of the parts for other ranks."""
        numel, dtype = self.values.numel(), self.values.dtype
        if self.in_splits is None:
            return native_nbytes.all_to_all_nbytes(numel, dtype, size)
        splits = Splits.of(self.in_splits, self.row)
        own = splits[dist.get_rank(self.group)]
        return native_nbytes.send_nbytes(splits.total - own, dtype)

    def send(self, channel: Channel, codec: Codec) -> Handle:
        """Exchange encoded parts; see ``collectives.all_to_all``."""
        values = self.values.detach().contiguous().view(-1)
        gives = None if self.in_splits is None else Splits.of(self.in_splits, self.row)
        takes = None if self.out_splits is None else Splits.of(self.out_splits, self.row)
        # the splits are compared once per message
        self.in_splits, self.out_splits = gives, takes
        if self.out is None:
            self.out = values.new_empty(values.numel() if takes is None else takes.total)
        channel.sample(
            values, codec.split_error_budget(1, 1, result=values.dtype)[0], self.direction
        )
        known, meter = channel.group(self.group), channel.meter(values.device)
        handle = collectives.all_to_all(
            self.out, values, Transfer(codec, known, meter), takes, gives, self.async_op,
        )  # fmt: skip
        share = len(known.remote) / max(1, known.size - 1)
        nbytes = self.native_nbytes(known.size)
        return channel.recorded(handle, meter, nbytes, self.direction, share)

    def complete(self, handle: Handle) -> Tensor:
        """Wait for the exchange and return ``out``."""
        handle.wait()
        assert self.out is not None, "sent"
        return self.out


@dataclass(eq=False, kw_only=True)
class Send(Message[None]):
    """Send ``values`` to the second rank of ``between``; the host waits only over gloo."""

    values: Tensor

    def load(self) -> Tensor:
        """Return the values to encode, 1-D contiguous."""
        return self.values

    def native_nbytes(self, size: int) -> int:
        """Return the bytes of the values."""
        return native_nbytes.send_nbytes(self.numel, self.dtype)

    def send(self, channel: Channel, codec: Codec) -> None:
        """Encode and send the values."""
        assert self.between is not None, "a message between two ranks"
        (source, target), values = self.between, self.load()
        channel.sample(values, codec.split_error_budget(1, 1, result=self.dtype)[0], self.direction)
        known, meter = channel.group(self.group), channel.meter(values.device)
        collectives.send(values, target, Transfer(codec, known, meter))
        nodes = channel.state.nodes
        crosses = nodes is not None and nodes.of_rank[source] != nodes.of_rank[target]
        meter.inter_nbytes = crosses * meter.wire_nbytes
        channel.record(meter, self.native_nbytes(known.size), self.direction, float(crosses))


@dataclass(eq=False, kw_only=True)
class Receive(Message[None]):
    """Receive into ``out`` from the first rank of ``between``; blocking.

    The sender counts the bytes; the receiver only adds its time.
    """

    out: Tensor

    def buffer(self) -> Tensor:
        """Return the 1-D contiguous tensor to decode into."""
        return self.out

    def put(self, values: Tensor) -> None:
        """Finish the receive once ``values``, a view of ``buffer``, are decoded."""

    def native_nbytes(self, size: int) -> int:
        """Return 0: the sender counts."""
        return 0

    def send(self, channel: Channel, codec: Codec) -> None:
        """Receive and decode."""
        assert self.between is not None, "a message between two ranks"
        values = self.buffer()
        known, meter = channel.group(self.group), channel.meter(self.out.device)
        collectives.recv(values, self.between[0], Transfer(codec, known, meter))
        self.put(values)
        channel.state.ledger.record_time((channel.dimension, self.direction), meter)


@dataclass
class Posted:
    """Point-to-point message that upstream posts; keep it until upstream has waited for it.

    Attributes:
        message: uint8 tensor that upstream sends or receives into.
        meter: counts the time of waiting for the message.
        done: called once upstream has waited: records a sent message, or decodes a received one.
    """

    message: Tensor
    meter: Meter
    done: Callable[[], None]


@dataclass(eq=False, kw_only=True)
class Post(Message[Posted]):
    """Message that upstream posts itself, from the first rank of ``between`` to the second.

    Attributes:
        values: 1-D contiguous, the values to send or the tensor to decode into.
        holders: group of ranks with the same values, each of which sends its part. The receivers
            gather the parts' bytes natively, as traffic of ``tp``. None: this rank sends
            everything.
    """

    values: Tensor
    holders: ProcessGroup | None = None

    def stays_native(self, channel: Channel, codec: Codec) -> bool:
        """Return whether messages stay native: ``codec``'s size varies, and there is no gloo.

        Equal on both sides. If so, raises ConfigError unless the block says ``"on_unsupported":
        "native"``: over NCCL both sides would wait for each other forever.
        """
        backends = channel.group(self.group).backends
        if codec.fixed_size or backends.get(self.values.device.type) == "gloo":
            return False
        name = channel.dimension
        found = Shown(f"{codec.name}, whose size varies with the values, and no gloo")
        if channel.state.config.on_unsupported != "native":
            todo = f'{VARIES}, or set "{name}": "none", or set "on_unsupported": "native"'
            raise ConfigError(f"{BLOCK}.{name}", found, todo)
        say_once(f"{name} native: {found}: {VARIES}")
        return True

    def _posting(self, channel: Channel, codec: Codec | None) -> Posting:
        holders = None if self.holders is None else channel.group(self.holders)
        return Posting(codec, holders)


@dataclass(eq=False, kw_only=True)
class PostSend(Post):
    """Encode ``values`` into a message that upstream sends."""

    def native_nbytes(self, size: int) -> int:
        """Return the bytes of the values; 0 with ``holders``, since ``send`` records the parts."""
        return 0 if self.holders is not None else self.values.nbytes

    def send(self, channel: Channel, codec: Codec | None) -> Posted:
        """Return the message for upstream; without ``codec``, the bytes of this rank's part."""
        posting = self._posting(channel, codec)
        part, meter = posting.part(self.values), channel.meter(self.values.device)
        if codec is not None:
            channel.sample(part, codec, self.direction)
        message = posting.encode(part, meter)

        def done() -> None:
            meter.sent(message.numel())
            channel.record(meter, self.values.nbytes, self.direction, 0.0)

        return Posted(message, meter, done)


@dataclass(eq=False, kw_only=True)
class PostReceive(Post):
    """Let upstream receive a message into a buffer; ``done`` decodes it into ``values``."""

    def native_nbytes(self, size: int) -> int:
        """Return 0: the sender counts."""
        return 0

    def send(self, channel: Channel, codec: Codec | None) -> Posted:
        """Return the receive buffer; without ``codec``, for the bytes of the sender's part."""
        assert self.between is not None, "a message between two ranks"
        posting, meter = self._posting(channel, codec), channel.meter(self.values.device)
        room, ledger, source = posting.room(self.values), channel.state.ledger, self.between[0]

        def done() -> None:
            gathered = posting.decode(room, self.values, source, meter)
            if gathered:
                ledger.record_native(("tp", self.direction), gathered)
            ledger.record_time((channel.dimension, self.direction), meter)

        return Posted(room, meter, done)
