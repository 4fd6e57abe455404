"""The common base of the encoded collectives that fill a slot of an FSDP2 group."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from hybridcomp.collectives import Handle

#: torch's collective of a slot
Native = TypeVar("Native", bound="AllGather | ReduceScatter")


class EncodedSlot(Generic[Native]):
    """A collective that replaces torch's own in a slot of a group."""

    native: Native

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate as the replaced collective does."""
        return self.native.allocate(size, dtype=dtype, device=device)


class HandleWork(dist.Work):
    """Handle as a ``Work``, the type that FSDP waits for."""

    def __init__(self, handle: Handle) -> None:
        super().__init__()
        self._handle = handle

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until everything is decoded."""
        self._handle.wait()
        return True

    def is_completed(self) -> bool:
        """Return whether ``wait`` has finished."""
        return self._handle.is_completed()
