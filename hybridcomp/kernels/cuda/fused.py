"""Launch kernels for all chunks of a reduction at once; only blockint has them."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from hybridcomp.errors import CodecError
from hybridcomp.kernels import DTYPE_CODES
from hybridcomp.kernels.cuda.launcher import DTYPES, WARPS, Launcher, ceil_div

TILES = 1024 * WARPS  # elements of a block of blockint.cu
#: limit on values of a rank's chunk: 32 bits hold a block's number (blockint_ranks.h, Span)
MOST_SUMMED = 1 << 36
SUM_THREADS = 64  # of a thread block of blockint_sum.cu, each of whose warps needs shared memory


@cache
def blockint_macros(setting: int) -> tuple[str, ...]:
    """Return the macros of one setting: bits, + 16 rotated, + 32 with Gaussian levels."""
    rotate = ("HC_ROTATE=1",) if setting & 16 else ()
    gaussian = ("HC_GAUSSIAN=1",) if setting & 32 else ()
    return (f"HC_BITS={setting & 15}", *rotate, *gaussian)


def blockint_image(setting: int, dtype: int) -> tuple[str, ...]:
    """Return the macros of the image with the kernels of one setting and one dtype."""
    return (*blockint_macros(setting), f"HC_DTYPE={dtype}")


class FusedBlockInt:
    """``codecs.base.Fused`` of blockint: three launches for an all_reduce, two for its half."""

    def __init__(self, launcher: Launcher, setting: int) -> None:
        self._launcher = launcher
        self._setting = setting

    def encode(
        self, values: Tensor, chunk: int, slot: int, skip: int, out: Tensor,
        residual: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Encode, a row of thread blocks for each chunk."""
        numel = values.numel()
        words = (values.data_ptr(), numel, chunk, slot, skip, out.data_ptr())
        if residual is None:
            self._rows("encode", values.dtype, numel, chunk, skip, *words)
        else:
            left = residual.data_ptr()
            self._rows("encode_feedback", values.dtype, numel, chunk, skip, *words, left)

    def reduce(
        self, payloads: Tensor, own: Tensor, ranks: int, me: int, out: Tensor,
        residual: Tensor | None = None, owner_residual: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Reduce, a warp for each tile: the sum stays in registers until it is encoded."""
        words = self._sum(payloads, own, ranks, me, out)
        if residual is None and owner_residual is None:
            self._add("reduce", own, *words)
        else:
            left = (0 if r is None else r.data_ptr() for r in (residual, owner_residual))
            self._add("reduce_feedback", own, *words, *left)

    def sum(
        self, payloads: Tensor, own: Tensor, ranks: int, me: int, out: Tensor,
        residual: Tensor | None = None, begun: bool = False,
    ) -> None:  # fmt: skip
        """Sum, a warp for each tile."""
        words = self._sum(payloads, own, ranks, me, out)
        if residual is None and not begun:
            self._add("sum", own, *words)
        else:
            left = 0 if residual is None else residual.data_ptr()
            self._add("sum_feedback", own, *words, left, out.data_ptr() if begun else 0)

    @staticmethod
    def _sum(payloads: Tensor, own: Tensor, ranks: int, me: int, out: Tensor) -> tuple[int, ...]:
        """Return the arguments that all summing kernels take."""
        slot = payloads.numel() // max(ranks - 1, 1)
        return (
            payloads.data_ptr(), own.data_ptr(), own.numel(), ranks, me, slot, out.data_ptr()
        )  # fmt: skip

    def decode(self, payloads: Tensor, chunk: int, slot: int, out: Tensor, skip: int = -1) -> None:
        """Decode, a row of thread blocks for each chunk."""
        numel = out.numel()
        words = (payloads.data_ptr(), numel, chunk, slot, skip, out.data_ptr())
        self._rows("decode", out.dtype, numel, chunk, skip, *words)

    def _rows(
        self, kernel: str, dtype: torch.dtype, numel: int, chunk: int, skip: int, *words: int
    ) -> None:
        """Launch a warp for each tile, and a row of the grid for each chunk but ``skip``."""
        rows = ceil_div(numel, chunk)
        rows -= 0 <= skip < rows
        if rows:
            image, name = image_of(self._setting, kernel, dtype)
            grid = (ceil_div(chunk, TILES), rows)
            self._launcher.launch("blockint.cu", image, name, grid, *words)

    def _add(self, kernel: str, own: Tensor, *words: int) -> None:
        """Launch a warp for each tile. Raises CodecError for more values than kernels can count."""
        numel = own.numel()
        check_summed(numel)
        blocks = ceil_div(numel, 32 * SUM_THREADS)
        if blocks:
            image, name = image_of(self._setting, kernel, own.dtype)
            self._launcher.launch(
                "blockint_sum.cu", image, name, (blocks, 1), *words, threads=SUM_THREADS
            )


def check_summed(numel: int) -> None:
    """Raise CodecError for more values of one rank than the kernels count."""
    if numel >= MOST_SUMMED:
        raise CodecError(
            f"blockint: expected fewer than {MOST_SUMMED} values for one rank to sum, found "
            f"{numel}; reduce in smaller buckets"
        )


@cache
def image_of(setting: int, kernel: str, dtype: torch.dtype) -> tuple[tuple[str, ...], str]:
    """Return the macros of an image and the kernel's name in it; cached, as each launch asks."""
    code = DTYPE_CODES[dtype]
    return blockint_image(setting, code), f"blockint_{kernel}_{DTYPES[code]}"
