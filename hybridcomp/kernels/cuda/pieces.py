"""Lay out tables of a message's pieces, for kernels that process all pieces in one launch."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hybridcomp.kernels.cuda.functions import ALIGN, CudaFunctions
from hybridcomp.kernels.cuda.launcher import THREADS, Launcher, Words
from hybridcomp.kernels.pieces import PayloadPiece

#: rows of a table passed by value (``table.h``); a longer table is copied to the device
NEAR, ROW_WORDS = 64, 7
#: most rows of a table: a grid has at most 65,535 rows
MOST = 1 << 15
#: values per thread block of pieces.cu
STEP = 4096
#: macro that compiles a source's kernels for all pieces; those for one tensor are another image
IMAGE = ("HC_PIECES=1",)


@dataclass(frozen=True)
class PieceTable:
    """``Pieces`` of table.h, for launches on the stream on which it was created.

    Attributes:
        table: the first argument of the kernels.
        count: number of pieces.
        longest: values of the longest piece.
        blocks: thread blocks for all pieces together.
        scratch: 32-bit words of scratch memory that two kernels share.
        far: the rows on the device, which must live until the launches have read them.
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
    """Yield a table of all non-empty ``pieces``, or several if there are more than ``MOST``.

    Args:
        launcher: launcher of the pieces' device.
        pieces: payloads begin at multiples of 16 bytes, unless ``aligned`` is False.
        step: values per thread block.
        room: (a, b): each piece gets ceil(numel / 2) + a * ceil(numel / b) 32-bit words of scratch
            memory; none if a is 0.
        ranks: number of consecutive pieces that have the same values and thread blocks.

    Raises ValueError for a misaligned payload.
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
            # words for the ticket, and one for each block
            work = self._launcher.zeros(1 + laid.blocks)
            arguments = (*words, work.data_ptr())
            self._launch_all(source, kernel, laid, arguments, threads)

    def _decode_all(
        self, source: str, kernel: str, pieces: Sequence[PayloadPiece], step: int, *words: int,
        ranks: int, looks: bool = False, threads: int = THREADS,
    ) -> None:  # fmt: skip
        """Launch a decoder for all pieces.

        ``looks``: whether it looks back: one ticket, and a word per block and rank.
        """
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
