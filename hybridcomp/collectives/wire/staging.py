"""Stage GPU tensors in pinned host memory for gloo.

gloo takes CUDA tensors only for all_reduce and broadcast, not for all_to_all, all_gather, send and
recv, whose messages therefore go through pinned host memory. Messages are encoded, so the copies
are short. With staging, several ranks can share one GPU, and clusters without NCCL can train.
"""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Work

from hybridcomp.collectives.wire.group import Group


class Staged(Work):
    """Message received in host memory (``room``) and copied to its place ``out`` on a GPU."""

    def __init__(self, work: Work, room: Tensor, out: Tensor) -> None:
        super().__init__()
        self._work, self._room, self._out = work, room, out

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the message, then copy it to the GPU on its current stream."""
        done = self._work.wait() if timeout is None else self._work.wait(timeout)
        STAGING.back(self._room, self._out)
        return done


class Staging:
    """Pinned host memory for GPU tensors over gloo: which messages need it, and the copies.

    Attributes:
        devices: device types whose tensors may need it.
    """

    devices = frozenset({"cuda"})

    def needed(self, tensor: Tensor, group: Group) -> bool:
        """Return whether ``tensor`` is on a GPU and ``group`` carries it over gloo."""
        return tensor.is_cuda and group.backends.get("cuda") == "gloo"

    def room(self, like: Tensor) -> Tensor:
        """Allocate pinned host memory for ``like``, contents undefined; torch caches the blocks."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True, device="cpu")

    def out(self, values: Tensor) -> Tensor:
        """Copy ``values`` to host memory; wait for the device, as gloo reads at once."""
        return self.room(values).copy_(values)

    def back(self, values: Tensor, there: Tensor) -> None:
        """Copy host ``values`` into the GPU tensor ``there``, without waiting for the copy."""
        there.copy_(values, non_blocking=True)


#: the staging of this process; tests replace it
STAGING = Staging()
