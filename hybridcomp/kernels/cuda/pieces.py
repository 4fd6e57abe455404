"""Lay out pieces of a message whose payloads vary in length, for kernels that take all of them."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hybridcomp.kernels.cuda.functions import ALIGN, CudaFunctions
from hybridcomp.kernels.cuda.launcher import THREADS, Launcher, Words
from hybridcomp.kernels.pieces import PayloadPiece

#: rows of a table that comes by value (``table.h``); a longer one is copied to the device
NEAR, ROW_WORDS = 64, 7
#: rows of a table: a grid has no more than 65,535 rows
MOST = 1 << 15
#: values that a thread block of pieces.cu takes
STEP = 4096
#: of kernels that take all pieces, where those for one tensor are an image of their own
IMAGE = ("HC_PIECES=1",)


@dataclass(frozen=True)
class PieceTable:
    """``Pieces`` of table.h, for launches on the stream that was current when it was made.

    Attributes:
        table: the first argument of the kernels.
        count: its pieces.
        longest: values of the longest one.
        blocks: thread blocks that all of them take.
        scratch: words of 32 bits of the room between two kernels.
        far: the rows on the device, which launches read as long as they are not freed.
    """

    table: bytes
    count: int
    longest: int
    blocks: int
    scratch: int
    far: Tensor | None


def lay_out(
    launcher: Launcher, pieces: Sequence[PayloadPiece], step: int, room: tuple[int, int] = (0, 1),
    ranks: int = 1, aligned: bool = True,
) -> Iterator[PieceTable]:  # fmt: skip
    """Yield one table of all ``pieces`` that have values, or several of more than ``MOST``.

    Args:
        launcher: of the device of the pieces.
        pieces: payloads begin at multiples of 16 bytes, unless ``aligned`` is False.
        step: values that a thread block takes.
        room: (a, b): words of 32 bits in the room between two kernels, ceil(numel / 2)
            + a * ceil(numel / b); none where a is 0.
        ranks: so many pieces, one after the other, are for the same values and blocks.

    Raises ValueError for a payload that does not begin where it should.
    """
    full = np.array(pieces, dtype=np.int64).reshape(-1, len(PayloadPiece._fields))
    full = full[full[:, 1] > 0]
    if aligned and (full[:, 2] % ALIGN).any():
        raise ValueError(f"a payload must begin at a multiple of {ALIGN} bytes")
    most = max(MOST // ranks, 1) * ranks
    for begin in range(0, len(full), most):
        yield _table(launcher, full[begin : begin + most], step, room, ranks)


def _table(
    launcher: Launcher, given: Words, step: int, room: tuple[int, int], ranks: int
) -> PieceTable:
    numels = given[::ranks, 1]
    rows = np.empty((len(given), ROW_WORDS), dtype=np.int64)
    rows[:, 1:6] = given
    blocks = -(-numels // step)
    rows[:, 0] = np.repeat(np.cumsum(blocks) - blocks, ranks)
    words = -(-numels // 2) + room[0] * -(-numels // room[1]) if room[0] else 0 * numels
    rows[:, 6] = np.repeat(np.cumsum(words) - words, ranks)
    far = launcher.words(rows) if len(rows) > NEAR else None
    head = struct.pack("<2Q", len(rows), 0 if far is None else far.data_ptr())
    near = (b"" if far is not None else rows.tobytes()).ljust(8 * ROW_WORDS * NEAR, b"\0")
    return PieceTable(
        head + near, len(rows), int(numels.max()), int(blocks.sum()), int(words.sum()), far
    )


class CudaPieces(CudaFunctions):
    """Functions of a codec with kernels for all pieces of a message, in one launch each way."""

    def on_values(self, kernel: str, pieces: Sequence[PayloadPiece]) -> None:
        """Launch ``pieces_<kernel>`` of pieces.cu for all pieces."""
        for laid in lay_out(self._launcher, pieces, STEP, aligned=False):
            name, grid = f"pieces_{kernel}", (laid.blocks, 1)
            self._launcher.launch("pieces.cu", (), name, grid, table=laid.table)

    def _encode_all(
        self, source: str, kernel: str, pieces: Sequence[PayloadPiece], step: int, *words: int,
        threads: int = THREADS,
    ) -> None:  # fmt: skip
        for laid in lay_out(self._launcher, pieces, step):
            work = self._launcher.zeros(1 + laid.blocks)  # the ticket, a word for each block
            arguments = (*words, work.data_ptr())
            self._launch_all(source, kernel, laid, arguments, threads)

    def _decode_all(
        self, source: str, kernel: str, pieces: Sequence[PayloadPiece], step: int, *words: int,
        ranks: int, looks: bool = False, threads: int = THREADS,
    ) -> None:  # fmt: skip
        """``looks``: decoders look back, and each rank's payloads need a word for each block."""
        for laid in lay_out(self._launcher, pieces, step, ranks=ranks):
            work = self._launcher.zeros(1 + laid.blocks * ranks) if looks else None
            arguments = (*words, ranks, *(() if work is None else (work.data_ptr(),)))
            arguments += (self._damage.word.data_ptr(),)
            self._launch_all(source, kernel, laid, arguments, threads)

    def _launch_all(
        self, source: str, kernel: str, laid: PieceTable, words: tuple[int, ...], threads: int
    ) -> None:
        grid, table = (laid.blocks, 1), laid.table
        self._launcher.launch(source, IMAGE, kernel, grid, *words, threads=threads, table=table)
