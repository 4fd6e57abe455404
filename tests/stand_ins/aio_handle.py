"""Stand-in for DeepSpeed's aio handle: whole files, aligned for O_DIRECT, of fixed size."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

ALIGNED = 512


class AioHandle:
    """Posts files and moves them in ``wait``; aborts if a size differs from the buffer's."""

    def __init__(self) -> None:
        self.buffers: dict[int, Any] = {}
        self.posted: list[tuple[Tensor, str, bool]] = []

    def new_cpu_locked_tensor(self, numel: int, like: Tensor) -> Tensor:
        room = torch.empty(numel * like.itemsize + ALIGNED, dtype=torch.uint8)
        start = -room.data_ptr() % ALIGNED
        made = room[start : start + numel * like.itemsize].view(like.dtype)
        self.buffers[made.untyped_storage().data_ptr()] = made
        return made

    def free_cpu_locked_tensor(self, tensor: Tensor) -> bool:
        return self.buffers.pop(tensor.untyped_storage().data_ptr(), None) is not None

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.buffers

    def async_pread(self, buffer: Tensor, path: str, offset: int) -> int:
        return self._post(buffer, path, True)

    def async_pwrite(self, buffer: Tensor, path: str, offset: int) -> int:
        return self._post(buffer, path, False)

    def _post(self, buffer: Tensor, path: str, is_read: bool) -> int:
        assert self.is_pinned(buffer) and buffer.data_ptr() % ALIGNED == 0
        assert buffer.nbytes % ALIGNED == 0
        self.posted.append((buffer, path, is_read))
        return 0

    def wait(self) -> int:
        posted, self.posted = self.posted, []
        for buffer, path, is_read in posted:
            data = buffer.view(torch.uint8).numpy().data
            if is_read:
                assert os.path.getsize(path) == buffer.nbytes, "buffer nbytes != file bytes"
                with open(path, "rb") as file:
                    file.readinto(data)
            else:
                with open(path, "r+b" if os.path.exists(path) else "wb") as file:
                    file.write(data)  # as O_CREAT without O_TRUNC
        return len(posted)
