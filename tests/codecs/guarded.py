"""Tensors that end at an unreadable page: an access past the end crashes."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


def empty(nbytes: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return a tensor of ``nbytes`` bytes, filled with 0xA5, that ends at a page's end."""
    if nbytes == 0:
        return torch.empty(0, dtype=dtype)
    pages = -(-nbytes // PAGE)
    memory = mmap.mmap(-1, (pages + 1) * PAGE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if _libc.mprotect(ctypes.c_void_p(base + pages * PAGE), ctypes.c_size_t(PAGE), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    start = pages * PAGE - nbytes
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=start)
    flat.fill_(0xA5)
    return flat.view(dtype)


def copy(values: Tensor) -> Tensor:
    """Copy ``values`` into such a tensor."""
    guarded = empty(values.numel() * values.itemsize, values.dtype)
    guarded.copy_(values)
    return guarded
