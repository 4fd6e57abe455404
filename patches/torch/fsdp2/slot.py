"""The ``Work`` that an asynchronous call of an FSDP2 group's encoded collective returns."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from hybridcomp.collectives import Handle


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
