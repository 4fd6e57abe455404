"""Scratch and wire buffers that are kept between calls.

A fresh 32 MiB buffer on a CPU costs 8192 page faults, more than the codec that fills it. On a GPU
torch's caching allocator does the same job, and knows the streams, so only CPU buffers are kept.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class Pool:
    """Free uint8 CPU buffers.

    A buffer that was taken belongs to one call until it is given back, so that any number of calls
    may be in flight; as many buffers exist as were ever in use at once. A buffer that is never
    given back (its call failed) is simply freed.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []  # by size, smallest first
        self._lock = threading.Lock()

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """A 1-D uint8 tensor of at least ``nbytes`` bytes, contents undefined."""
        if device.type == "cpu":
            with self._lock:
                for index, buffer in enumerate(self._free):
                    if buffer.numel() >= nbytes:
                        return self._free.pop(index)
                if self._free:
                    self._free.pop()  # too small for today's messages: the new one replaces it
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def take_fp32(self, numel: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """``(buffer, view)``: give the buffer back, use the view of ``numel`` fp32 elements."""
        buffer = self.take(4 * numel, device)
        return buffer, buffer[: 4 * numel].view(torch.float32)

    def give(self, *buffers: Tensor | None) -> None:
        """Give buffers back; nothing may read or write them any more. None is skipped."""
        kept = [b for b in buffers if b is not None and not b.is_cuda and b.device.type == "cpu"]
        if not kept:
            return
        with self._lock:
            self._free.extend(kept)
            self._free.sort(key=Tensor.numel)

    def clear(self) -> None:
        """Free every buffer that is not in use."""
        with self._lock:
            self._free.clear()


def first(buffer: Tensor, nbytes: int) -> Tensor:
    """The first ``nbytes`` bytes; no new view (1 us) where that is all of it, as on a GPU."""
    return buffer if buffer.numel() == nbytes else buffer[:nbytes]


#: the pool of this process
POOL = Pool()
