"""Read tensors from a device without waiting, or several with a single wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def read_together(tensors: Sequence[Tensor]) -> list[list[Any]]:
    """Return the values of 1-D tensors; the host waits once per device.

    Tensors of the same device and dtype must be equally long.
    """
    found: list[list[Any]] = [[] for _ in tensors]
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        alike.setdefault((tensor.device, tensor.dtype), []).append(place)
    for places in alike.values():
        rows = torch.stack([tensors[place] for place in places]).tolist()
        for place, row in zip(places, rows, strict=True):
            found[place] = row
    return found


class LateRead:
    """Copy one tensor at a time to the host, asynchronously.

    The copy is enqueued on the current stream of the tensor's device, so it has the values that
    earlier work on this stream has written.
    """

    def __init__(self) -> None:
        self._copy: Tensor | None = None
        self._event: Any = None

    @property
    def pending(self) -> bool:
        """Return whether a copy was started and not taken yet."""
        return self._copy is not None

    def start(self, value: Tensor) -> None:
        """Start a copy of ``value``; replaces a copy that was not taken."""
        if value.device.type != "cuda":
            self._copy, self._event = value.detach().clone(), None
            return
        with torch.cuda.device(value.device):
            self._copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=True, device="cpu")
            self._copy.copy_(value, non_blocking=True)
            make_event: Any = torch.cuda.Event  # untyped in torch
            self._event = make_event()
            self._event.record()

    def take(self) -> Tensor | None:
        """Return the copy on the host if it has arrived, only once; else None."""
        if self._copy is None or (self._event is not None and not self._event.query()):
            return None
        found, self._copy = self._copy, None
        return found
