"""One tensor between two pipeline stages, as bytes; see ``mcore_pp``. No seam is in here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import Channels
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import transport
from hybridcomp.collectives.handle import Pending
from hybridcomp.collectives.meter import Meter
from hybridcomp.patches import mcore_refuse
from hybridcomp.patches.calls import flat
from hybridcomp.patches.process import say
from hybridcomp.policy import Direction

VARIABLE = mcore_refuse.Rule(
    "bypass", ("pp",), "a codec whose size varies with the values",
    "megatron-core posts receives before the sender has encoded, so their length must be known",
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

    def send(self, tensor: Tensor) -> Outgoing:
        """Encode the part of this tensor rank."""
        values = flat(tensor)
        part = values
        if self.parts > 1:
            part = values.chunk(self.parts)[dist.get_rank(self.tensor_group)]
        meter = Meter()
        if self.codec is None:
            payload = part.view(torch.uint8)
        else:
            self.channels["pp"].sample(part, self.codec, self.direction)
            payload = self._room(part.numel(), part)
            with meter.coding():
                self.codec.encode(part, payload)
        meter.sent(payload.numel())
        return Outgoing(self, payload, tensor.numel() * tensor.element_size(), meter)

    def recv(self, tensor: Tensor) -> Incoming:
        """Room for a payload that will be decoded into ``tensor``."""
        values = tensor.detach().view(-1)
        return Incoming(self, self._room(values.numel() // self.parts, values), values)

    def _room(self, numel: int, like: Tensor) -> Tensor:
        nbytes = numel * like.element_size()
        if self.codec is not None:
            nbytes = self.codec.wire_nbytes(numel, like.dtype)
        return torch.empty(nbytes, dtype=torch.uint8, device=like.device)


@dataclass
class Outgoing:
    """A payload under way; alive until ``done``."""

    link: Link
    payload: Tensor
    raw_nbytes: int
    meter: Meter

    def done(self) -> None:
        """Write the message down."""
        key = ("pp", self.link.direction)
        self.link.channels.ledger.record(key, self.raw_nbytes, self.meter)  # type: ignore[arg-type]


@dataclass
class Incoming:
    """A payload that is awaited."""

    link: Link
    payload: Tensor
    values: Tensor
    meter: Meter = field(default_factory=Meter)

    def decode(self) -> None:
        """Gather the parts if there are parts, and decode into ``values``."""
        link, payload = self.link, self.payload
        if link.parts > 1:
            payload = self._gathered()
        with self.meter.coding():
            for part, place in zip(
                payload.chunk(link.parts), self.values.chunk(link.parts), strict=True
            ):
                if link.codec is None:
                    place.copy_(part.view(place.dtype))
                else:
                    link.codec.decode(part, place)
        entry = link.channels.ledger.interval["pp", link.direction]
        entry.codec_s += self.meter.codec_s
        entry.wait_s += self.meter.wait_s

    def _gathered(self) -> Tensor:
        link = self.link
        out = self.payload.new_empty(link.parts * self.payload.numel())
        steps = transport.all_gather(out, self.payload, link.tensor_group)
        Pending(steps, self.meter, async_op=False)
        nbytes = (link.parts - 1) * self.payload.numel()
        link.channels["tp"].native(nbytes, link.direction)
        return out


def link(
    channels: Channels, tensor: Tensor, group: Any, direction: Direction, config: Any
) -> Link | None:
    """How ``tensor`` travels to or from a neighbouring stage; None: as upstream sends it."""
    codec = channels["pp"].codec(tensor.numel(), tensor.dtype, group, direction)
    if codec is not None and not codec.fixed_size:
        mcore_refuse.apply(VARIABLE, ["pp"], channels.config)
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
        say(f"pp: scatter_gather cannot cut {tensor.numel()} values for {size} tensor ranks")
        return None
    return group if size > 1 else None
