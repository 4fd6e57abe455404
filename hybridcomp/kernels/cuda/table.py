"""Launch kernels for several tensors at once, each with its payload; only blockint has them."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import repeat

from torch import Tensor

from hybridcomp.kernels import DTYPE_CODES
from hybridcomp.kernels.cuda.fused import blockint_image, start_of
from hybridcomp.kernels.cuda.launcher import DTYPES, WARPS, Launcher, ceil_div
from hybridcomp.kernels.kept import Kept, bits_of, words_of
from hybridcomp.kernels.stretches import TILE

#: rows of a table in table.h; more tensors take more launches
ROWS = 84
ROW_WORDS = 6


class EachBlockInt:
    """blockint's ``MultiTensorKernel``: one launch for up to ROWS tensors."""

    def __init__(self, launcher: Launcher, setting: int) -> None:
        self._launcher = launcher
        self._setting = setting

    def encode(
        self, values: Sequence[Tensor], out: Sequence[Tensor],
        residuals: Sequence[Kept] | None = None,
    ) -> None:  # fmt: skip
        """Encode, one warp for each tile."""
        if values:
            dtype = DTYPE_CODES[values[0].dtype]
            kernel = "encode" if residuals is None else "encode_feedback"
            self._run(f"{kernel}_{DTYPES[dtype]}", dtype, values, out, residuals)

    def decode(
        self, payloads: Sequence[Tensor], out: Sequence[Tensor], *, add: bool = False
    ) -> None:
        """Decode, one warp for each tile."""
        if out:
            dtype = DTYPE_CODES[out[0].dtype]
            self._run("add" if add else f"decode_{DTYPES[dtype]}", dtype, out, payloads, None)

    def _run(
        self, kernel: str, dtype: int, values: Sequence[Tensor], payloads: Sequence[Tensor],
        residuals: Sequence[Kept] | None,
    ) -> None:  # fmt: skip
        kept = bits_of(residuals[0]) if residuals else 32
        name, image = f"blockint_table_{kernel}", blockint_image(self._setting, dtype, kept)
        for tiles, table in _tables(values, payloads, residuals):
            # blocks of 32, 64 and 128 threads are no faster, from 64 KB on (H100)
            grid = (ceil_div(tiles, WARPS), 1)
            self._launcher.launch("blockint_table.cu", image, name, grid, table=table)


def _tables(
    values: Sequence[Tensor], payloads: Sequence[Tensor], residuals: Sequence[Kept] | None
) -> Iterator[tuple[int, bytes]]:
    """Yield tables of at most ROWS non-empty tensors, with the number of tiles of each table."""
    words: list[int] = []
    tiles = 0
    for one, payload, residual in zip(values, payloads, residuals or repeat(None), strict=False):
        numel = one.numel()
        if not numel:
            continue
        left = (*words_of(residual, bits_of(residual)), 0)[:2]
        words += (tiles, one.data_ptr(), numel, start_of(payload), *left)
        tiles += ceil_div(numel, TILE)
        if len(words) == ROWS * ROW_WORDS:
            yield tiles, _packed(words)
            words, tiles = [], 0
    if words:
        yield tiles, _packed(words)


def _packed(words: list[int]) -> bytes:
    """Pack a ``Table`` of table.h, always at full size."""
    empty = bytes(8 * (ROWS * ROW_WORDS - len(words)))
    return struct.pack(f"<{1 + len(words)}Q", len(words) // ROW_WORDS, *words) + empty
