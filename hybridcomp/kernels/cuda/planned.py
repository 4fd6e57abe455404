"""Launch kernels for the stretches of a plan, which lie in a table on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridcomp.kernels.cuda.fused import SUM_THREADS, check_summed, image_of
from hybridcomp.kernels.cuda.launcher import WARPS, Launcher, ceil_div
from hybridcomp.kernels.cuda.table import TILE
from hybridcomp.kernels.kept import Kept, bits_of, words_of
from hybridcomp.kernels.stretches import PlannedStretch, StretchTable


class PlannedBlockInt:
    """``codecs.launches.PlannedKernel`` of blockint."""

    def __init__(self, launcher: Launcher, setting: int) -> None:
        self._launcher, self._setting = launcher, setting

    def table(
        self, stretches: Sequence[PlannedStretch], device: torch.device, *, sums: bool = False
    ) -> StretchTable:
        """Number the tiles of all rows one after the other, from whole thread blocks on in sums."""
        step = SUM_THREADS // 32 if sums else 1
        rows, tiles = [], 0
        for one in stretches:
            if sums:
                check_summed(one.numel)
            if one.numel:
                rows.append((tiles, one.values, one.numel, one.payload, one.out))
                tiles += ceil_div(ceil_div(one.numel, TILE), step) * step
        words = torch.tensor(rows, dtype=torch.int64).view(-1, 5).to(device)
        return StretchTable(words, len(rows), ceil_div(tiles, step if sums else WARPS))

    def encode(
        self, table: StretchTable, values: Tensor | None, payloads: Tensor,
        residual: Kept | None = None,
    ) -> None:  # fmt: skip
        """Encode, one warp for each tile."""
        if values is None:
            assert isinstance(residual, Tensor), "neither values nor an fp32 residual that has them"
            kernel, dtype, start = "encode_held", residual.dtype, 0
        else:
            kernel, dtype, start = "encode", values.dtype, values.data_ptr()
            kernel += "" if residual is None else "_feedback"
        bits = bits_of(residual)
        left = words_of(residual, bits)
        self._launch(kernel, dtype, table, start, payloads.data_ptr(), *left, bits=bits)

    def decode(self, table: StretchTable, payloads: Tensor, out: Tensor) -> None:
        """Decode, one warp for each tile."""
        self._launch("decode", out.dtype, table, payloads.data_ptr(), out.data_ptr())

    def sum(
        self, table: StretchTable, payloads: Tensor, own: Tensor, ranks: int, me: int, out: Tensor,
        residual: Kept | None = None,
    ) -> None:  # fmt: skip
        """Sum, one warp for each tile."""
        slot = payloads.numel() // max(ranks - 1, 1)
        words = (payloads.data_ptr(), own.data_ptr(), ranks, me, slot, out.data_ptr())
        kernel, bits = "sum" if residual is None else "sum_feedback", bits_of(residual)
        self._launch(kernel, own.dtype, table, *words, *words_of(residual, bits), bits=bits)

    def _launch(
        self, kernel: str, dtype: torch.dtype, table: StretchTable, *words: int, bits: int = 32
    ) -> None:
        if not table.blocks:
            return
        image, name = image_of(self._setting, f"planned_{kernel}", dtype, bits)
        source, threads = _BLOCKS[kernel.startswith("sum")]
        self._launcher.launch(
            source, image, name, (table.blocks, 1), table.words.data_ptr(), table.count, *words,
            threads=threads,
        )  # fmt: skip


#: source and threads of a block, of sums and of all else
_BLOCKS = {True: ("blockint_sum.cu", SUM_THREADS), False: ("blockint_table.cu", 32 * WARPS)}
