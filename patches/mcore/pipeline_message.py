"""Choose codec and split of a message between two pipeline stages; see ``pipeline``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import Channel, Channels, Posted, PostReceive, PostSend
from hybridcomp.codecs.base import Codec
from hybridcomp.log import say_once
from hybridcomp.patches.common.collective_wrappers import flat
from hybridcomp.policy import Direction
from hybridcomp.rules.engine import Rule, apply

VARIABLE: Rule[None] = Rule(
    "bypass", ("pp",), "a codec whose size varies with the values, and no gloo",
    "megatron-core posts receives before the sender has encoded, and only gloo takes a message "
    "that is shorter than its receive",
    "use a codec of fixed size, such as blockint or zfp", lambda job: True,
)  # fmt: skip


@dataclass(eq=False, kw_only=True)
class StageSend(PostSend):
    """Message to a neighbouring stage; natively only where a codec's size varies and NCCL sends."""

    channels: Channels

    def stays_native(self, channel: Channel, codec: Codec) -> bool:
        """Return whether upstream's transport cannot take messages of this codec."""
        return _is_refused(codec, self.group, self.channels)


@dataclass(eq=False, kw_only=True)
class StageReceive(PostReceive):
    """Message from a neighbouring stage, as ``StageSend``."""

    channels: Channels

    def stays_native(self, channel: Channel, codec: Codec) -> bool:
        """Return whether upstream's transport cannot take messages of this codec."""
        return _is_refused(codec, self.group, self.channels)


def _is_refused(codec: Codec, group: Any, channels: Channels) -> bool:
    if codec.fixed_size or dist.get_backend(group) == "gloo":
        return False
    say_once(apply(VARIABLE, ["pp"], channels.config))
    return True


def post(
    channels: Channels,
    tensor: Tensor,
    group: Any,
    direction: Direction,
    config: Any,
    between: tuple[int, int],
) -> Posted | None:
    """Return the message of ``tensor`` between two global ranks; None: upstream sends it.

    Without a codec tensor ranks that hold the same tensor still send a part each, unencoded.
    """
    channel, sends = channels["pp"], between[0] == dist.get_rank()
    kind = StageSend if sends else StageReceive
    message = kind(
        numel=tensor.numel(), dtype=tensor.dtype, group=group, direction=direction,
        between=between, values=flat(tensor) if sends else tensor.detach().view(-1),
        holders=_tensor_group(channels, tensor, config), channels=channels,
    )  # fmt: skip
    return channel.run(
        message,
        native=lambda: None if message.holders is None else message.post(channel, None),
        encoded=lambda posted: posted,
    )


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
