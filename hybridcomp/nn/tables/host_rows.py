"""Keep the rows of a table and their optimizer states in host memory, or in mapped files."""

from __future__ import annotations

import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

#: bytes of the pieces in which rows are initialized, saved and loaded
PIECE_NBYTES = 64 << 20


class HostRows:
    """This rank's ``rows`` rows as tensors by name: ``weight`` and optimizer states.

    With a ``folder`` the tensors lie in mapped files there, which are unlinked at once, so that the
    system frees them whenever the process ends. Pages never written take no memory and no disk.
    """

    def __init__(self, rows: int, folder: Path | None) -> None:
        self.rows, self.folder = rows, folder
        self.states: dict[str, Tensor] = {}

    def nbytes(self, tail: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes of all rows of shape ``tail``."""
        return self.rows * math.prod(tail) * dtype.itemsize

    def add(self, name: str, tail: Sequence[int], dtype: torch.dtype) -> None:
        """Add zeros (rows, *tail) under ``name``. Raises OSError if the file cannot be made."""
        shape = (self.rows, *tail)
        if self.folder is None or not math.prod(shape):
            self.states[name] = torch.zeros(shape, dtype=dtype, device="cpu")
            return
        handle, path = tempfile.mkstemp(prefix=f"rows.{name}.", dir=self.folder)
        try:
            os.truncate(handle, self.nbytes(tail, dtype))
            mapped = mmap.mmap(handle, self.nbytes(tail, dtype))
        finally:
            os.close(handle)
            os.unlink(path)
        # rows are far apart: without this every fault reads 128 KiB around its page
        mapped.madvise(mmap.MADV_RANDOM)
        self.states[name] = torch.frombuffer(mapped, dtype=dtype).view(shape)

    def fill(self, init: Callable[[Tensor, Tensor], object], first: int, step: int) -> None:
        """Fill the weights by ``init(rows, ids)``, in pieces; row i has id first + i * step."""
        weight = self.states["weight"]
        for low, high in pieces(self.rows, weight[:1].nbytes):
            ids = torch.arange(low, high, device="cpu") * step + first
            init(weight[low:high], ids)

    def read(self, rows: Tensor) -> dict[str, Tensor]:
        """Return copies of ``rows``, int64; pinned where there is a GPU."""
        copies = {}
        for name, values in self.states.items():
            out = torch.empty(
                (len(rows), *values.shape[1:]),
                dtype=values.dtype,
                pin_memory=is_pinning(),
                device="cpu",
            )
            copies[name] = torch.index_select(values, 0, rows, out=out)
        return copies

    def write(self, rows: Tensor, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self.states[name].index_copy_(0, rows, value)


def is_pinning() -> bool:
    """Return whether copies to a device gain from pinned memory."""
    is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return is_used


def pieces(rows: int, row_nbytes: int) -> list[tuple[int, int]]:
    """Return the borders of pieces of ``PIECE_NBYTES`` at most, a row at least."""
    step = max(1, PIECE_NBYTES // max(1, row_nbytes))
    return [(low, min(low + step, rows)) for low in range(0, rows, step)]


def room(folder: Path | None) -> tuple[str, int]:
    """Return a name of the memory or disk that holds rows, equal on all ranks using it, and its
    free bytes.

    Raises OSError if there is no such folder.
    """
    host = os.uname().nodename
    if folder is not None:
        return f"{host}: disk of {folder.stat().st_dev}", shutil.disk_usage(folder).free
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":", 1) for line in file)
    return f"{host}: memory", int(fields["MemAvailable"].split()[0]) << 10
