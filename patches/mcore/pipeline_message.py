"""One tensor between two pipeline stages, as bytes; see ``pipeline``.

A payload whose size varies has a header in front (``collectives.p2p``), which says its length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import Channels
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.send_recv import HEADER_NBYTES, Header, check_match, spec_digest
from hybridcomp.collectives.wire import transport
from hybridcomp.collectives.wire.buffers import POOL
from hybridcomp.collectives.wire.exchange import gather, gather_room
from hybridcomp.collectives.wire.handle import Pending
from hybridcomp.collectives.wire.meter import Meter
from hybridcomp.log import say_once
from hybridcomp.policy import Direction
from hybridcomp.routing.routes import flat
from hybridcomp.rules.engine import Rule, apply

VARIABLE: Rule[None] = Rule(
    "bypass", ("pp",), "a codec whose size varies with the values, and no gloo",
    "megatron-core posts receives before the sender has encoded, and only gloo takes a message "
    "that is shorter than its receive",
    "use a codec of fixed size, such as blockint or zfp", lambda job: True,
)  # fmt: skip


@dataclass(frozen=True)
class Link:
    """How a tensor travels: encoded or raw, whole or one part from every tensor rank."""

    channels: Channels
    codec: Codec | None
    direction: Direction
    parts: int = 1
    tensor_group: dist.ProcessGroup | None = None

    @property
    def headed(self) -> bool:
        """Whether a header stands in front, because only the sender knows the length."""
        return self.codec is not None and not self.codec.fixed_size

    def send(self, tensor: Tensor) -> Outgoing:
        """Encode the part of this tensor rank."""
        values = flat(tensor)
        part = values
        if self.parts > 1:
            part = values.chunk(self.parts)[dist.get_rank(self.tensor_group)]
        meter = self.channels["pp"].meter(tensor.device)
        nbytes = tensor.numel() * tensor.element_size()
        if self.codec is None:
            return Outgoing(self, part.view(torch.uint8), nbytes, meter)
        self.channels["pp"].samples.take(part, self.codec, self.direction)
        room = self._room(part.numel(), part)
        start = HEADER_NBYTES if self.headed else 0
        with meter.coding():
            used = self.codec.encode(part, room[start:])
        if self.headed:
            header = Header(spec_digest(self.codec.spec), part.dtype, part.numel(), used)
            room[:start] = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
        return Outgoing(self, room[: start + used], nbytes, meter)

    def recv(self, tensor: Tensor, src: int) -> Incoming:
        """Room for a message of rank ``src`` that will be decoded into ``tensor``."""
        values = tensor.detach().view(-1)
        room = self._room(values.numel() // self.parts, values)
        return Incoming(self, room, values, src, self.channels["pp"].meter(tensor.device))

    def _room(self, numel: int, like: Tensor) -> Tensor:
        nbytes = numel * like.element_size()
        if self.codec is not None:
            nbytes = self.codec.wire_nbytes(numel, like.dtype)
        nbytes += HEADER_NBYTES if self.headed else 0
        return torch.empty(nbytes, dtype=torch.uint8, device=like.device)


@dataclass
class Outgoing:
    """A message under way; alive until ``done``."""

    link: Link
    message: Tensor
    raw_nbytes: int
    meter: Meter

    def done(self) -> None:
        """Write the message down."""
        self.meter.sent(self.message.numel())
        key = ("pp", self.link.direction)
        self.link.channels.ledger.record(key, self.raw_nbytes, self.meter)  # type: ignore[arg-type]


@dataclass
class Incoming:
    """A message that is awaited. ``message`` has room for the longest."""

    link: Link
    message: Tensor
    values: Tensor
    src: int
    meter: Meter

    @property
    def payload(self) -> Tensor:
        """What has arrived behind the header, if there is one."""
        link = self.link
        if link.codec is None or not link.headed:
            return self.message
        header = Header.unpack(bytes(self.message[:HEADER_NBYTES].tolist()))
        numel = self.values.numel() // link.parts
        check_match(header, self.src, numel, self.values.dtype, link.codec)
        return self.message[HEADER_NBYTES : HEADER_NBYTES + header.nbytes]

    def decode(self) -> None:
        """Gather the parts if there are parts, and decode into ``values``."""
        link = self.link
        payloads = [self.payload] if link.parts == 1 else self._gathered()
        with self.meter.coding():
            for part, place in zip(payloads, self.values.chunk(link.parts), strict=True):
                if link.codec is None:
                    place.copy_(part.view(place.dtype))
                else:
                    link.codec.decode(part, place)
        link.channels.ledger.record_time(("pp", link.direction), self.meter)

    def _gathered(self) -> list[Tensor]:
        """The payloads of all tensor ranks: native traffic of ``tp``, of bytes."""
        link, meter, own = self.link, Meter(clock=self.meter.clock), self.payload
        if link.codec is None:
            out = own.new_empty(link.parts * own.numel())
            Pending(transport.all_gather(out, own, link.tensor_group), meter, async_op=False)
            meter.sent((link.parts - 1) * own.numel())
            payloads = list(out.chunk(link.parts))
        else:
            numels = [[self.values.numel() // link.parts]] * link.parts
            kind = link.codec, self.values.dtype
            slots = gather_room(*kind, numels, own.device, link.tensor_group)
            slots.nbytes.append(own.numel())
            slots.buffer[slots.head : slots.head + own.numel()].copy_(own)
            steps = gather(*kind, slots, numels, link.tensor_group, meter)
            rows, _ = Pending(steps, meter, async_op=False).wait()
            POOL.give(slots.buffer)
            payloads = [payload for (payload,) in rows]
        self.meter.wait_s += meter.wait_s
        self.meter.spans += meter.spans
        link.channels["tp"].native(meter.wire_nbytes, link.direction)
        return payloads


def link(
    channels: Channels,
    tensor: Tensor,
    group: Any,
    direction: Direction,
    config: Any,
    hop: tuple[int, int],
) -> Link | None:
    """How ``tensor`` travels between the global ranks of ``hop``; None: as upstream sends it."""
    codec = channels["pp"].codec(tensor.numel(), tensor.dtype, group, direction, hop)
    if codec is not None and not codec.fixed_size and dist.get_backend(group) != "gloo":
        say_once(apply(VARIABLE, ["pp"], channels.config))
        codec = None
    tensor_group = _tensor_group(channels, tensor, config)
    if tensor_group is not None:
        parts = dist.get_world_size(tensor_group)
        return Link(channels, codec, direction, parts, tensor_group)
    return None if codec is None else Link(channels, codec, direction)


def _tensor_group(channels: Channels, tensor: Tensor, config: Any) -> dist.ProcessGroup | None:
    """The ranks that hold this same tensor and share its transport; None: every rank sends all."""
    block = channels.config
    if not block.pp.scatter_gather or getattr(config, "sequence_parallel", True):
        return None
    if channels.step < block.start_step:
        return None
    if tensor.numel() * tensor.element_size() < block.min_bytes:
        return None
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return None  # mcore_refuse has said so
    group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
    size = dist.get_world_size(group)
    if size > 1 and tensor.numel() % size:
        say_once(f"pp: scatter_gather cannot cut {tensor.numel()} values for {size} tensor ranks")
        return None
    return group if size > 1 else None
