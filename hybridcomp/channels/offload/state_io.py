"""Read and write the files of optimizer states, with the methods of DeepSpeed's aio handle."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridcomp.channels.offload.state_files import (
    ALIGNED,
    NEW,
    StateFiles,
    check,
    damaged,
    pack,
    room_for,
    unpack,
    unwritten,
)
from hybridcomp.errors import StateFileError
from hybridcomp.log import complain

#: most free buffers that a handle keeps
SPARE = 4
#: bytes per read or write call
CALL = 1 << 30
#: files whose size is a multiple of this are read past the page cache
DIRECT = 512


@dataclass
class FileMove:
    """One file being read or written.

    Attributes:
        half: bf16 parameters relative to which the file is encoded.
        buffer, room: buffer of the file's bytes, and the part of it that they use.
        work: future of encoding or reading it.
    """

    path: str
    values: Tensor
    half: Tensor | None
    buffer: Tensor
    room: Tensor
    is_read: bool
    work: Future[Any] | None = None


class StateHandle:
    """Replace DeepSpeed's ``aio_handle``: calls queue reads and writes for ``wait``."""

    def __init__(self, files: StateFiles, inner: Any = None, threads: int = 1) -> None:
        """Read and write the files of ``files``.

        Args:
            inner: DeepSpeed's handle, which does the input and output; None: threads of this
                process do.
            threads: number of threads over which ``inner`` splits a file.
        """
        self._files, self._inner = files, inner
        self._aligned = ALIGNED * max(1, threads)
        self._moves: list[FileMove] = []
        self._spare: list[Tensor] = []
        self._pinned: dict[int, Tensor] = {}

    def new_cpu_locked_tensor(self, numel: int, like: Tensor) -> Tensor:
        """Return a buffer of ``numel`` values of the dtype of ``like``, pinned with a GPU."""
        if self._inner is not None:
            found: Tensor = self._inner.new_cpu_locked_tensor(numel, like)
            return found
        made = torch.zeros(
            int(numel), dtype=like.dtype, pin_memory=torch.cuda.is_available(), device="cpu"
        )
        self._pinned[made.untyped_storage().data_ptr()] = made
        return made

    def free_cpu_locked_tensor(self, tensor: Tensor) -> bool:
        """Free a buffer; return False if it does not belong to this handle."""
        if self._inner is not None:
            return bool(self._inner.free_cpu_locked_tensor(tensor))
        return self._pinned.pop(tensor.untyped_storage().data_ptr(), None) is not None

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` lies in a buffer of this handle."""
        if self._inner is not None:
            return bool(self._inner.is_pinned(tensor))
        return tensor.untyped_storage().data_ptr() in self._pinned

    def async_pwrite(self, buffer: Tensor, path: str, offset: int) -> int:
        """Begin to write ``buffer``, which must not change before ``wait``; returns 0."""
        assert offset == 0, "swappers write whole files"
        self._post(buffer, path, room_for(buffer.view(-1), self._files.codec, self._aligned), False)
        return 0

    def async_pread(self, buffer: Tensor, path: str, offset: int) -> int:
        """Begin to read into ``buffer``, which holds the values after ``wait``; returns 0."""
        assert offset == 0, "swappers read whole files"
        nbytes = os.path.getsize(path) if os.path.exists(path) else 0
        self._post(buffer, path, nbytes, True)
        return 0

    def _post(self, buffer: Tensor, path: str, nbytes: int, is_read: bool) -> None:
        files, values = self._files, buffer.detach().view(-1)
        whole = self._take(nbytes)
        move = FileMove(path, values, files.half(path), whole, whole[:nbytes], is_read)
        self._moves.append(move)
        if not is_read:
            move.work = files.pool.submit(self._encode, move)
        elif self._inner is None or nbytes % DIRECT:  # a swapper's files never have this size
            move.work = files.pool.submit(_read, path, move.room)
        elif nbytes:
            self._inner.async_pread(move.room, path, 0)

    def wait(self) -> int:
        """Complete all queued reads and writes; return their number.

        Raises StateFileError if a read failed, after all others have ended. A failed write is
        raised by ``StateFiles.hold`` and by any later read of the file.
        """
        moves, self._moves = self._moves, []
        failed = self._write_all([move for move in moves if not move.is_read])
        reads = [move for move in moves if move.is_read]
        if self._inner is not None and reads:
            self._inner.wait()
        for move in reads:
            if move.work is not None and (error := _caught(move.work)):
                failed.append((move, error))
                move.room = move.room[:0]
        left = [move for move in reads if all(move is not one for one, _ in failed)]
        works = [(move, self._files.pool.submit(self._decode, move)) for move in left]
        failed += [(move, error) for move, work in works if (error := _caught(work))]
        for move in moves:
            self._give(move.buffer)
        self._tell(failed)
        return len(moves)

    def _write_all(self, moves: list[FileMove]) -> list[tuple[FileMove, StateFileError]]:
        """Write the encoded files and rename them into place."""
        failed: list[tuple[FileMove, StateFileError]] = []
        ready: list[tuple[FileMove, int, bytes, Future[None] | None]] = []
        for move in moves:
            assert move.work is not None
            size, footer, seconds = move.work.result()
            self._files.count(move.values.nbytes, size, seconds)
            work = None
            if self._inner is None:
                work = self._files.pool.submit(_write, move.path, move.room[:size])
            else:
                Path(move.path + NEW).unlink(missing_ok=True)
                self._inner.async_pwrite(move.room[:size], move.path + NEW, 0)
            ready.append((move, size, footer, work))
        if self._inner is not None and ready:
            self._inner.wait()
        for move, size, footer, work in ready:
            self._files.known[move.path] = footer  # the previous file must no longer be accepted
            error = None if work is None else _caught(work)
            try:
                if error is None:
                    os.replace(move.path + NEW, move.path)
            except OSError as problem:
                error = unwritten(move.path, problem, size)
            if error is not None:
                failed.append((move, error))
        return failed

    def _encode(self, move: FileMove) -> tuple[int, bytes, float]:
        start = time.perf_counter()
        files, name = self._files, os.path.basename(move.path)
        size, footer = pack(
            move.values, name, files.rank, files.codec, move.half, move.room, self._aligned
        )
        return size, footer.pack(), time.perf_counter() - start

    def _decode(self, move: FileMove) -> None:
        """Check a file that was read, and write its values into the caller's buffer."""
        files, start, nbytes = self._files, time.perf_counter(), move.room.numel()
        expected = files.known.get(move.path)
        if not nbytes and move.values.numel():
            raise damaged(move.path, "it is missing or empty")
        # DeepSpeed wrote it without hybridcomp
        if expected is None and nbytes == move.values.nbytes:
            move.values.view(torch.uint8).copy_(move.room)
        else:
            footer = check(move.path, move.room, files.rank, expected)
            unpack(move.path, move.room, footer, move.half, move.values)
        files.loaded.pop(move.path, None)
        files.count(move.values.nbytes, nbytes, time.perf_counter() - start)

    def _tell(self, failed: list[tuple[FileMove, StateFileError]]) -> None:
        files = self._files
        for move, error in failed:
            if files.failed is None:
                files.failed = error
                complain(str(error))
            if move.is_read and not files.poisons:
                raise error
            if move.is_read:
                move.values.fill_(float("nan"))

    def _take(self, nbytes: int) -> Tensor:
        """Return a buffer of at least ``nbytes``, a spare one if possible."""
        for place, spare in enumerate(self._spare):
            if spare.numel() >= nbytes:
                return self._spare.pop(place)
        if self._inner is None:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        like = torch.empty(0, dtype=torch.uint8, device="cpu")
        made: Tensor = self._inner.new_cpu_locked_tensor(max(nbytes, ALIGNED), like)
        return made

    def _give(self, buffer: Tensor) -> None:
        """Keep a buffer for later files; only the largest are kept."""
        self._spare = sorted([*self._spare, buffer], key=Tensor.numel, reverse=True)
        for left in self._spare[SPARE:] if self._inner is not None else ():
            self._inner.free_cpu_locked_tensor(left)
        del self._spare[SPARE:]


def _caught(work: Future[Any]) -> StateFileError | None:
    try:
        work.result()
    except StateFileError as error:
        return error
    return None


def _read(path: str, room: Tensor) -> None:
    try:
        with open(path, "rb") as file:
            data: memoryview = room.numpy().data
            while data:
                count = file.readinto(data[:CALL])
                if not count:
                    raise damaged(path, "it has become shorter while it was read")
                data = data[count:]
    except OSError as error:
        raise damaged(path, f"it cannot be read ({error.strerror or error})") from error


def _write(path: str, data: Tensor) -> None:
    try:
        with open(path + NEW, "wb", buffering=0) as file:
            left: memoryview = data.numpy().data
            while left:
                left = left[file.write(left[:CALL]) :]
    except OSError as error:
        raise unwritten(path, error, data.numel()) from error
