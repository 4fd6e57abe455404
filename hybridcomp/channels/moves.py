"""Messages of a channel without a sum: all-gather, all-to-all, send and receive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hybridcomp import collectives
from hybridcomp.channels.codec_choice import CodecChoice
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import Handle, Meter, ReduceScatterHandle, Transfer
from hybridcomp.collectives.posted import Posting
from hybridcomp.collectives.ring import Ring
from hybridcomp.policy import Direction

H = TypeVar("H", Handle, ReduceScatterHandle)


@dataclass
class Posted:
    """Point-to-point message that upstream posts; keep it until upstream has waited for it.

    Attributes:
        message: uint8 tensor that upstream sends or receives into.
        meter: counts the time of waiting for the message.
        done: to be called once when upstream has waited: records a sent message, decodes a
            received one.
    """

    message: Tensor
    meter: Meter
    done: Callable[[], None]


class Moves(CodecChoice):
    """One dimension: messages whose values are not summed on the way."""

    def gather_words(self, words: Tensor, group: ProcessGroup | None) -> list[list[int]]:
        """Gather the int64 ``words`` of all ranks, beside a message of upstream; blocking."""
        meter = self.meter(words.device)
        rows = collectives.gather_words(words, self.group(group), meter)
        self._state.ledger.record_extra((self.dimension, "forward"), meter)
        return rows

    def all_gather(
        self,
        shard: Tensor,
        out: Tensor,
        codec: Codec,
        group: ProcessGroup | None,
        *,
        raw_nbytes: int,
        direction: Direction = "forward",
        cuts: Sequence[int] = (),
        async_op: bool = False,
        relative_to: Tensor | None = None,
    ) -> Handle:
        """Gather the shards of all ranks into ``out``; every rank decodes the same bytes.

        ``cuts``: see ``collectives.all_gather``. ``relative_to``: the tensor whose norm the sampled
        error is divided by, None for ``shard``.
        """
        (only,) = codec.hops(1, 1, result=shard.dtype)
        self.sample(shard, only, direction, cuts, relative_to)
        known, meter = self.group(group), self.meter(shard.device)
        via = Transfer(codec, known, meter, cuts)
        handle = collectives.all_gather(shard, out, via, async_op)
        return self._recorded(handle, meter, raw_nbytes, direction, known.ring)

    def all_to_all(
        self,
        out: Tensor,
        values: Tensor,
        codec: Codec,
        group: ProcessGroup | None,
        *,
        raw_nbytes: int,
        out_splits: Sequence[int] | None = None,
        in_splits: Sequence[int] | None = None,
        direction: Direction = "forward",
        async_op: bool = False,
    ) -> Handle:
        """Exchange parts of ``values`` between all ranks; splits in elements."""
        self.sample(values, codec.hops(1, 1, result=values.dtype)[0], direction)
        known, meter = self.group(group), self.meter(values.device)
        via = Transfer(codec, known, meter)
        handle = collectives.all_to_all(out, values, via, out_splits, in_splits, async_op)
        share = len(known.remote) / max(1, known.size - 1)
        return self._recorded(handle, meter, raw_nbytes, direction, share)

    def send(
        self,
        tensor: Tensor,
        dst: int,
        codec: Codec,
        group: ProcessGroup | None,
        *,
        raw_nbytes: int,
        direction: Direction = "forward",
    ) -> None:
        """Send ``tensor`` (1-D, contiguous) to the global rank ``dst``; blocking."""
        self.sample(tensor, codec.hops(1, 1, result=tensor.dtype)[0], direction)
        meter = self.meter(tensor.device)
        collectives.send(tensor, dst, Transfer(codec, self.group(group), meter))
        nodes = self._state.nodes
        crosses = nodes is not None and nodes.of_rank[dst] != nodes.of_rank[dist.get_rank()]
        meter.inter_nbytes = crosses * meter.wire_nbytes
        self._record(meter, raw_nbytes, direction, float(crosses))

    def recv(
        self,
        tensor: Tensor,
        src: int,
        codec: Codec,
        group: ProcessGroup | None,
        *,
        direction: Direction = "forward",
    ) -> None:
        """Receive into ``tensor`` (1-D, contiguous) from the global rank ``src``; blocking.

        The sender counts the bytes; the receiver only adds its time.
        """
        meter = self.meter(tensor.device)
        collectives.recv(tensor, src, Transfer(codec, self.group(group), meter))
        self._state.ledger.record_time((self.dimension, direction), meter)

    def post_send(
        self,
        values: Tensor,
        codec: Codec | None,
        *,
        direction: Direction = "forward",
        holders: ProcessGroup | None = None,
    ) -> Posted:
        """Encode ``values`` (1-D, contiguous) into a message that upstream posts itself.

        ``codec``: None sends the values' own bytes. ``holders``: the ranks that hold the same
        values, each of which sends its part; None: this rank sends all.
        """
        posting = self._posting(codec, holders)
        part, meter = posting.part(values), self.meter(values.device)
        if codec is not None:
            self.sample(part, codec, direction)
        message = posting.encode(part, meter)

        def done() -> None:
            meter.sent(message.numel())
            self._record(meter, values.nbytes, direction, 0.0)

        return Posted(message, meter, done)

    def post_recv(
        self,
        values: Tensor,
        src: int,
        codec: Codec | None,
        *,
        direction: Direction = "forward",
        holders: ProcessGroup | None = None,
    ) -> Posted:
        """Return the buffer for a message of the global rank ``src`` that upstream receives itself.

        ``done`` decodes it into ``values`` (1-D, contiguous). Arguments as for ``post_send``. Where
        there are ``holders``, they gather their parts: native traffic of ``tp``, of bytes.
        """
        posting, meter = self._posting(codec, holders), self.meter(values.device)
        room, ledger = posting.room(values), self._state.ledger

        def done() -> None:
            gathered = posting.decode(room, values, src, meter)
            if gathered:
                ledger.record_native(("tp", direction), gathered)
            ledger.record_time((self.dimension, direction), meter)

        return Posted(room, meter, done)

    def _posting(self, codec: Codec | None, holders: ProcessGroup | None) -> Posting:
        return Posting(codec, None if holders is None else self.group(holders))

    def ring(self, codec: Codec | None, group: ProcessGroup | None, device: torch.device) -> Ring:
        """Return the ``Ring`` that sends ring attention's messages round ``group``.

        Call ``circled`` once it has finished.
        """
        return Ring(codec, self.group(group), self.meter(device), device)

    def circled(self, ring: Ring, raw_nbytes: int, direction: Direction = "forward") -> None:
        """Record the messages of a finished ring; ``raw_nbytes``: bytes native would have sent.

        Without a codec the ring sends just these, plus headers.
        """
        if ring.codec is None:
            self.native(raw_nbytes, direction)
            self._state.ledger.record_time((self.dimension, direction), ring.meter)
            return
        ring.meter.use(ring.codec.spec)
        self._record(ring.meter, raw_nbytes, direction, ring.group.ring)

    def posts_once(self, codec: Codec, group: ProcessGroup | None) -> bool:
        """Return whether an ``all_gather`` posts its only message before ``wait()``."""
        return codec.fixed_size and self.group(group).levels is None

    def _recorded(
        self, handle: H, meter: Meter, raw_nbytes: int, direction: Direction, inter: float
    ) -> H:
        handle.then(lambda: self._record(meter, raw_nbytes, direction, inter))
        return handle
