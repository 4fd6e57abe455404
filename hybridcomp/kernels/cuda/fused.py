"""Kernels for all chunks of a reduction at once; only blockint has them."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from hybridcomp.kernels.cuda.launcher import DTYPES, THREADS, WARPS, WHOLE, Launcher, ceil_div

SUM_THREADS = 64  # of a block of blockint_sum.cu: what it has in shared memory is a warp's


@cache
def blockint_macros(setting: int) -> tuple[str, ...]:
    """The macros of one setting: bits, + 16 rotated, + 32 with Gaussian levels."""
    rotate = ("HC_ROTATE=1",) if setting & 16 else ()
    gaussian = ("HC_GAUSSIAN=1",) if setting & 32 else ()
    return (f"HC_BITS={setting & 15}", *rotate, *gaussian)


def blockint_image(setting: int, dtype: int) -> tuple[str, ...]:
    """The macros of the image with the kernels of one setting and one dtype."""
    return (*blockint_macros(setting), f"HC_DTYPE={dtype}")


class FusedBlockInt:
    """``codecs.base.Fused`` of blockint: three launches for an all_reduce, two for its half."""

    def __init__(self, launcher: Launcher, setting: int) -> None:
        self._launcher = launcher
        self._defines = blockint_macros(setting)

    def encode(
        self, values: Tensor, chunk: int, slot: int, skip: int, out: Tensor,
        residual: Tensor | None = None,
    ) -> None:  # fmt: skip
        """A row of blocks for each chunk."""
        chunks = ceil_div(values.numel(), chunk)
        rows = chunks - 1 if 0 <= skip < chunks else chunks
        words = (values.data_ptr(), values.numel(), chunk, slot, skip, out.data_ptr())
        if residual is None:
            self._rows("encode", values, chunk, rows, *words)
        else:
            self._rows("encode_feedback", values, chunk, rows, *words, residual.data_ptr())

    def reduce(
        self, payloads: Tensor, own: Tensor, ranks: int, me: int, out: Tensor,
        residual: Tensor | None = None, owner_residual: Tensor | None = None,
    ) -> None:  # fmt: skip
        """A warp a tile: the sum stays in registers between decoding and encoding."""
        words = self._sum(payloads, own, ranks, me, out)
        if residual is None and owner_residual is None:
            self._add("reduce", own, *words)
        else:
            left = (0 if r is None else r.data_ptr() for r in (residual, owner_residual))
            self._add("reduce_feedback", own, *words, *left)

    def sum(
        self, payloads: Tensor, own: Tensor, ranks: int, me: int, out: Tensor,
        residual: Tensor | None = None,
    ) -> None:  # fmt: skip
        """A warp a tile."""
        words = self._sum(payloads, own, ranks, me, out)
        if residual is None:
            self._add("sum", own, *words)
        else:
            self._add("sum_feedback", own, *words, residual.data_ptr())

    @staticmethod
    def _sum(payloads: Tensor, own: Tensor, ranks: int, me: int, out: Tensor) -> tuple[int, ...]:
        """What the kernels that sum have in common."""
        slot = payloads.numel() // max(ranks - 1, 1)
        return (
            payloads.data_ptr(), own.data_ptr(), own.numel(), ranks, me, slot, out.data_ptr()
        )  # fmt: skip

    def decode(self, payloads: Tensor, chunk: int, slot: int, out: Tensor) -> None:
        """A row of blocks for each chunk."""
        rows = ceil_div(out.numel(), chunk)
        words = (payloads.data_ptr(), out.numel(), chunk, slot, WHOLE, out.data_ptr())
        self._rows("decode", out, chunk, rows, *words)

    def _rows(self, kernel: str, values: Tensor, chunk: int, rows: int, *words: int) -> None:
        """A warp a tile, a row of the grid for each chunk."""
        grid = (ceil_div(chunk, 1024 * WARPS), rows)
        self._launch("blockint.cu", kernel, values, grid, THREADS, *words)

    def _add(self, kernel: str, own: Tensor, *words: int) -> None:
        """A warp a tile."""
        grid = (ceil_div(own.numel(), 32 * SUM_THREADS), 1)
        self._launch("blockint_sum.cu", kernel, own, grid, SUM_THREADS, *words)

    def _launch(
        self, source: str, kernel: str, values: Tensor, grid: tuple[int, int], threads: int,
        *words: int,
    ) -> None:  # fmt: skip
        if grid[0] and grid[1]:
            dtype = _code(values)
            self._launcher.launch(
                source, (*self._defines, f"HC_DTYPE={dtype}"),
                f"blockint_{kernel}_{DTYPES[dtype]}", grid, *words, threads=threads,
            )  # fmt: skip


def _code(values: Tensor) -> int:
    return (torch.float32, torch.bfloat16, torch.float16).index(values.dtype)
