"""Buffer the bytes of one part for a receiver: from a file, or frame by frame from a stream.

A frame is received into memory once, and payloads are decoded from there without another copy. Data
beyond a version's memory limit goes to a temporary file.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from bisect import bisect_right
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from hybridcomp.publishing.checksums import bytes_of
from hybridcomp.publishing.records import need

#: bytes of a version that are kept in memory while receiving
IN_MEMORY = 1 << 28
#: alignment of the codecs' payloads
ALIGN = 16


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError, also for a pipe, which might never answer."""
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(number, "rb")


class FileBytes:
    """A file in a folder; the caller owns and closes it."""

    def __init__(self, file: BinaryIO) -> None:
        """Hold ``file``."""
        self._file: Any = file

    def size(self) -> int:
        """Return the number of bytes."""
        return int(self._file.seek(0, 2))

    def at(self, offset: int, nbytes: int) -> Tensor:
        """Return bytes as uint8 on the host, aligned. Raises ValueError if there are fewer."""
        room = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._file.seek(offset)
        need(self._file.readinto(bytes_of(room)) == nbytes, "the size of its payload")
        return room


class Spool:
    """Frames of one part, in order; each is a tensor, or a range of a temporary file.

    The file has no name and vanishes with the spool.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._starts: list[int] = []
        self._chunks: list[Tensor | tuple[int, int]] = []
        self._size = 0
        self._file: Any = None

    def keep(self, chunk: Tensor, in_memory: bool) -> None:
        """Append ``chunk``, 1-D uint8; the caller must not reuse it. Raises OSError."""
        self._starts.append(self._size)
        self._size += chunk.numel()
        if in_memory:
            self._chunks.append(chunk)
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._chunks.append((self._file.seek(0, 2), chunk.numel()))
        self._file.write(bytes_of(chunk))

    def size(self) -> int:
        """Return the number of bytes."""
        return self._size

    def at(self, offset: int, nbytes: int) -> Tensor:
        """Return bytes as ``FileBytes.at``, without a copy if they lie in one frame in memory."""
        need(offset >= 0 and nbytes >= 0 and offset + nbytes <= self._size, "the size of a payload")
        pieces, number = [], bisect_right(self._starts, offset) - 1
        while nbytes:
            low = offset - self._starts[number]
            piece = self._piece(number, low, nbytes)
            pieces.append(piece)
            offset, nbytes, number = offset + len(piece), nbytes - len(piece), number + 1
        if len(pieces) != 1:
            return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device="cpu")
        return pieces[0] if pieces[0].data_ptr() % ALIGN == 0 else pieces[0].clone()

    def _piece(self, number: int, low: int, most: int) -> Tensor:
        """Return bytes of a chunk from ``low`` on, ``most`` of them or up to its end."""
        chunk = self._chunks[number]
        if isinstance(chunk, Tensor):
            return chunk[low : low + most]
        start, length = chunk
        return FileBytes(self._file).at(start + low, min(most, length - low))

    def close(self) -> None:
        """Free memory and file."""
        self._chunks, self._starts, self._size = [], [], 0
        if self._file is not None:
            self._file.close()
            self._file = None


#: readable bytes of one part
PartBytes = FileBytes | Spool
