"""Payloads of a GPU through pinned host memory, for groups on gloo.

gloo itself takes CUDA tensors for few collectives (all_reduce and broadcast; no all_to_all, no
all_gather, no send and recv). What travels here is encoded, so the copies are short, several ranks
can share one GPU, and clusters without NCCL work.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class Staging:
    """Decides which messages go through host memory, and makes that memory."""

    def needed(self, tensor: Tensor, group: ProcessGroup | None) -> bool:
        """Whether ``group`` would carry ``tensor`` over gloo although it is on a GPU."""
        return tensor.is_cuda and backend_of(group, tensor.device) == "gloo"

    def room(self, like: Tensor) -> Tensor:
        """Pinned host memory for ``like``, contents undefined; torch keeps freed blocks."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def out(self, values: Tensor) -> Tensor:
        """``values`` in host memory; waits for the device, as gloo reads them at once."""
        return self.room(values).copy_(values)

    def back(self, values: Tensor, there: Tensor) -> None:
        """``values`` of the host into ``there``, in the order of its stream; nobody waits."""
        there.copy_(values, non_blocking=True)


def backend_of(group: ProcessGroup | None, device: torch.device) -> str:
    """The name of the backend that carries tensors of ``device``; groups may have several."""
    return _backends(dist.get_backend_config(group)).get(device.type, "")


@cache
def _backends(config: str) -> dict[str, str]:
    """By the type of a device."""
    return dict(part.split(":") for part in config.split(","))


#: of this process; tests put another one here
STAGING = Staging()
