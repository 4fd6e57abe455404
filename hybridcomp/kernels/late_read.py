"""What a device knows, read by a host that waits for nothing: copied now, looked at later."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LateRead:
    """One tensor at a time on its way to the host.

    The copy is enqueued on the current stream of the tensor's device, so it holds what was written
    there before.
    """

    def __init__(self) -> None:
        self._copy: Tensor | None = None
        self._event: Any = None

    @property
    def pending(self) -> bool:
        """Whether something was started and not taken yet."""
        return self._copy is not None

    def start(self, value: Tensor) -> None:
        """Begin to copy ``value``; what was on its way before is forgotten."""
        if value.device.type != "cuda":
            self._copy, self._event = value.detach().clone(), None
            return
        with torch.cuda.device(value.device):
            self._copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._copy.copy_(value, non_blocking=True)
            make_event: Any = torch.cuda.Event  # untyped
            self._event = make_event()
            self._event.record()

    def take(self) -> Tensor | None:
        """The copy, on the host and once, if it has arrived; None where it has not."""
        if self._copy is None or (self._event is not None and not self._event.query()):
            return None
        found, self._copy = self._copy, None
        return found
