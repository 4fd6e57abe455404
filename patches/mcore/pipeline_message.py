"""Choose codec and split of a message between two pipeline stages; see ``pipeline``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import Channel, Channels, Posted
from hybridcomp.codecs.base import Codec
from hybridcomp.log import say_once
from hybridcomp.patches.common.routes import flat
from hybridcomp.policy import Direction
from hybridcomp.rules.engine import Rule, apply

VARIABLE: Rule[None] = Rule(
    "bypass", ("pp",), "a codec whose size varies with the values, and no gloo",
    "megatron-core posts receives before the sender has encoded, and only gloo takes a message "
    "that is shorter than its receive",
    "use a codec of fixed size, such as blockint or zfp", lambda job: True,
)  # fmt: skip


@dataclass(frozen=True)
class PipelineMessage:
    """Codec and split of a message: encoded or raw (no codec), whole or a part per holder."""

    channel: Channel
    codec: Codec | None
    direction: Direction
    holders: dist.ProcessGroup | None = None

    def send(self, tensor: Tensor) -> Posted:
        """Encode this rank's part of ``tensor`` into a message that upstream posts."""
        return self.channel.post_send(
            flat(tensor), self.codec, direction=self.direction, holders=self.holders
        )

    def recv(self, tensor: Tensor, src: int) -> Posted:
        """Return a buffer for a message of rank ``src``, to be decoded into ``tensor``."""
        values = tensor.detach().view(-1)
        return self.channel.post_recv(
            values, src, self.codec, direction=self.direction, holders=self.holders
        )


def message_of(
    channels: Channels,
    tensor: Tensor,
    group: Any,
    direction: Direction,
    config: Any,
    between: tuple[int, int],
) -> PipelineMessage | None:
    """Return the message of ``tensor`` between two global ranks; None: upstream sends it."""
    codec = channels["pp"].codec(tensor.numel(), tensor.dtype, group, direction, between)
    if codec is not None and not codec.fixed_size and dist.get_backend(group) != "gloo":
        say_once(apply(VARIABLE, ["pp"], channels.config))
        codec = None
    holders = _tensor_group(channels, tensor, config)
    if codec is None and holders is None:
        return None
    return PipelineMessage(channels["pp"], codec, direction, holders)


def _tensor_group(channels: Channels, tensor: Tensor, config: Any) -> dist.ProcessGroup | None:
    """Return the ranks that hold the same tensor and each send a part; None: each sends all."""
    block = channels.config
    if not block.pp.scatter_gather or getattr(config, "sequence_parallel", True):
        return None
    if channels.step < block.start_step:
        return None
    if tensor.numel() * tensor.element_size() < block.min_bytes:
        return None
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return None  # the check has announced it
    group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
    size = dist.get_world_size(group)
    if size > 1 and tensor.numel() % size:
        say_once(f"pp: scatter_gather cannot cut {tensor.numel()} values for {size} tensor ranks")
        return None
    return group if size > 1 else None
