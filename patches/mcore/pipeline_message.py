"""Choose the codec of a pipeline message, and its split over tensor ranks; see ``pipeline``."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import Channels, Posted, PostReceive, PostSend
from hybridcomp.dimensions import Direction
from hybridcomp.log import say_once
from hybridcomp.patches.common.collective_wrappers import flat


def post(
    channels: Channels,
    tensor: Tensor,
    group: Any,
    direction: Direction,
    config: Any,
    between: tuple[int, int],
) -> Posted | None:
    """Return the message of ``tensor`` between two global ranks; None: upstream sends it.

    If tensor ranks hold the same tensor, each sends a part of it, also without a codec.
    """
    channel, sends = channels["pp"], between[0] == dist.get_rank()
    kind = PostSend if sends else PostReceive
    message = kind(
        numel=tensor.numel(), dtype=tensor.dtype, group=group, direction=direction,
        between=between, values=flat(tensor) if sends else tensor.detach().view(-1),
        holders=_tensor_group(channels, tensor, config),
    )  # fmt: skip
    return channel.run(
        message,
        native=lambda: None if message.holders is None else message.send(channel, None),
        encoded=lambda posted: posted,
    )


def _tensor_group(channels: Channels, tensor: Tensor, config: Any) -> dist.ProcessGroup | None:
    """Return the tensor group whose ranks each send a part of ``tensor``; None: it is not split."""
    block = channels.config
    if not block.pp.scatter_gather or getattr(config, "sequence_parallel", True):
        return None
    if channels.step < block.start_step:
        return None
    if tensor.numel() * tensor.element_size() < block.min_bytes:
        return None
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return None  # ``check`` has printed that nothing is split
    group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
    size = dist.get_world_size(group)
    if size > 1 and tensor.numel() % size:
        # not the length itself: variable lengths would print a line each
        say_once(f"pp: scatter_gather cuts no message whose length is no multiple of {size}")
        return None
    return group if size > 1 else None
