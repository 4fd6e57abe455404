"""Launch kernels for all chunks of a reduction at once; only blockint has them."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from hybridcomp.errors import CodecError
from hybridcomp.kernels import DTYPE_CODES
from hybridcomp.kernels.cuda.functions import ALIGN
from hybridcomp.kernels.cuda.launcher import DTYPES, WARPS, Launcher, ceil_div
from hybridcomp.kernels.kept import Kept, bits_of, words_of

TILES = 1024 * WARPS  # elements per thread block of blockint.cu
#: limit on values of a rank's chunk: a block's number has 32 bits (blockint_ranks.h, Span)
MOST_SUMMED = 1 << 36
SUM_THREADS = 64  # threads per block of blockint_sum.cu, few as each warp needs shared memory


@cache
def blockint_macros(setting: int) -> tuple[str, ...]:
    """Return the macros of one setting: bits, + 16 rotated, + 32 or 128 for levels, + 64 random."""
    rotate = ("HC_ROTATE=1",) if setting & 16 else ()
    levels = ("HC_LEVELS=1",) if setting & 32 else ("HC_LEVELS=2",) if setting & 128 else ()
    random = ("HC_RANDOM=1",) if setting & 64 else ()
    return (f"HC_BITS={setting & 15}", *rotate, *levels, *random)


def blockint_image(setting: int, dtype: int, kept: int = 32) -> tuple[str, ...]:
    """Return the macros of the image that has the kernels of one setting and dtype.

    ``kept`` below 32: the image has only kernels with a residual of that many bits per value.
    """
    few = (f"HC_KEPT={kept}",) if kept < 32 else ()
    return (*blockint_macros(setting), *few, f"HC_DTYPE={dtype}")


class FusedBlockInt:
    """blockint's ``CollectiveKernel``: 3 launches for an all_reduce, 2 for a reduce_scatter."""

    def __init__(self, launcher: Launcher, setting: int) -> None:
        self._launcher = launcher
        self._setting = setting

    def encode(
        self, values: Tensor, chunk: int, slot: int, skip: int, out: Tensor,
        residual: Kept | None = None,
    ) -> None:  # fmt: skip
        """Encode, a row of thread blocks for each chunk."""
        words = (values.data_ptr(), values.numel(), chunk, slot, skip, out.data_ptr())
        self._rows("encode", values, chunk, skip, words, residual)

    def reduce(
        self, payloads: Tensor, own: Tensor, ranks: int, me: int, out: Tensor,
        residual: Kept | None = None, owner_residual: Kept | None = None,
    ) -> None:  # fmt: skip
        """Reduce, a warp for each tile; the sum stays in registers until it is encoded."""
        words = self._sum(payloads, own, ranks, me, out)
        if residual is None and owner_residual is None:
            self._add("reduce", own, 32, *words)
        else:
            bits = bits_of(residual if owner_residual is None else owner_residual)
            left = (*words_of(residual, bits), *words_of(owner_residual, bits))
            self._add("reduce_feedback", own, bits, *words, *left)

    def sum(
        self, payloads: Tensor, own: Tensor, ranks: int, me: int, out: Tensor,
        residual: Kept | None = None, begin: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Sum, a warp for each tile."""
        words = self._sum(payloads, own, ranks, me, out)
        if residual is None and begin is None:
            self._add("sum", own, 32, *words)
        else:
            bits = bits_of(residual)
            left = (*words_of(residual, bits), 0 if begin is None else begin.data_ptr())
            self._add("sum_feedback", own, bits, *words, *left)

    @staticmethod
    def _sum(payloads: Tensor, own: Tensor, ranks: int, me: int, out: Tensor) -> tuple[int, ...]:
        """Return the arguments that all summing kernels take."""
        slot = payloads.numel() // max(ranks - 1, 1)
        return (
            payloads.data_ptr(), own.data_ptr(), own.numel(), ranks, me, slot, out.data_ptr()
        )  # fmt: skip

    def decode(self, payloads: Tensor, chunk: int, slot: int, out: Tensor, skip: int = -1) -> None:
        """Decode, a row of thread blocks for each chunk."""
        words = (payloads.data_ptr(), out.numel(), chunk, slot, skip, out.data_ptr())
        self._rows("decode", out, chunk, skip, words)

    def _rows(
        self, kernel: str, values: Tensor, chunk: int, skip: int, words: tuple[int, ...],
        residual: Kept | None = None,
    ) -> None:  # fmt: skip
        """Launch a warp for each tile, and a grid row for each chunk except ``skip``."""
        rows, bits = ceil_div(values.numel(), chunk), 32
        rows -= 0 <= skip < rows
        if residual is not None:
            bits, kernel = bits_of(residual), f"{kernel}_feedback"
            words = (*words, *words_of(residual, bits))
        if rows:
            image, name = image_of(self._setting, kernel, values.dtype, bits)
            grid = (ceil_div(chunk, TILES), rows)
            self._launcher.launch("blockint.cu", image, name, grid, *words)

    def _add(self, kernel: str, own: Tensor, bits: int, *words: int) -> None:
        """Launch a warp for each tile. Raises CodecError for more values than kernels can count.

        ``bits``: bits per value of the residuals.
        """
        numel = own.numel()
        check_summed(numel)
        blocks = ceil_div(numel, 32 * SUM_THREADS)
        if blocks:
            image, name = image_of(self._setting, kernel, own.dtype, bits)
            self._launcher.launch(
                "blockint_sum.cu", image, name, (blocks, 1), *words, threads=SUM_THREADS
            )


def check_summed(numel: int) -> None:
    """Raise CodecError if one rank has more values than the kernels can count."""
    if numel >= MOST_SUMMED:
        raise CodecError(
            f"blockint: expected fewer than {MOST_SUMMED} values for one rank to sum, found "
            f"{numel}; reduce in smaller buckets"
        )


def start_of(payloads: Tensor) -> int:
    """Return the address of ``payloads``. Raises ValueError if it is misaligned."""
    start = payloads.data_ptr()
    if start % ALIGN:
        raise ValueError(f"blockint: a payload must begin at a multiple of {ALIGN} bytes")
    return start


@cache
def image_of(
    setting: int, kernel: str, dtype: torch.dtype, kept: int = 32
) -> tuple[tuple[str, ...], str]:
    """Return the macros of an image and the kernel's name in it; cached, since each launch asks."""
    code = DTYPE_CODES[dtype]
    return blockint_image(setting, code, kept), f"blockint_{kernel}_{DTYPES[code]}"
