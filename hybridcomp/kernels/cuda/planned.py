"""Launch kernels for any number of slices of one tensor; only blockint has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridcomp.kernels.cuda.fused import SUM_THREADS, check_summed, image_of, start_of
from hybridcomp.kernels.cuda.launcher import WARPS, Launcher, ceil_div, stream_getter
from hybridcomp.kernels.kept import Kept, bits_of, words_of
from hybridcomp.kernels.stretches import PlannedStretch, StretchTable

_stream = stream_getter()


class PlannedBlockInt:
    """``codecs.launches.PlannedKernel`` of blockint."""

    def __init__(self, launcher: Launcher, setting: int) -> None:
        self._launcher, self._setting = launcher, setting
        #: tables that are never freed, since CUDA graphs read their device rows at every replay
        self._captured: set[StretchTable] = set()

    def table(self, stretches: Sequence[PlannedStretch], *, sums: bool = False) -> StretchTable:
        """Make a table with tiles numbered over all rows; a sum's row starts a thread block."""
        if not sums:
            return StretchTable.of(stretches)
        for one in stretches:
            check_summed(one.numel)
        return StretchTable.of(stretches, SUM_THREADS // 32)

    def encode(
        self, table: StretchTable, values: Tensor | None, payloads: Tensor,
        residual: Kept | None = None,
    ) -> None:  # fmt: skip
        """Encode, one warp for each tile."""
        if residual is None:
            assert values is not None, "neither values nor a residual that has them"
            start = values.data_ptr()
            self._launch_near("encode", values, table, 1, start, start_of(payloads))
            return
        if values is None:
            assert isinstance(residual, Tensor), "an fp32 residual has the values"
            kernel, like, start = "encode_held", residual, 0
        else:
            kernel, like, start = "encode_feedback", values, values.data_ptr()
        bits = bits_of(residual)
        words = (start, start_of(payloads), *words_of(residual, bits))
        self._launch(kernel, like, table, *words, bits=bits)

    def decode(
        self, table: StretchTable, payloads: Tensor, out: Tensor, ranks: int = 1, slot: int = 0
    ) -> None:
        """Decode, one warp for each tile."""
        words = (start_of(payloads), out.data_ptr(), out.numel() // ranks, slot)
        self._launch_near("decode", out, table, ranks, *words)

    def sum(
        self, table: StretchTable, payloads: Tensor, own: Tensor, ranks: int, me: int, out: Tensor,
        residual: Kept | None = None, begin: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Sum, one warp for each tile."""
        slot, bits = payloads.numel() // max(ranks - 1, 1), bits_of(residual)
        words = (payloads.data_ptr(), own.data_ptr(), ranks, me, slot, out.data_ptr())
        left = words_of(residual, bits)
        if residual is None and begin is None:
            self._launch("sum", own, table, *words, *left, bits=bits)
        else:
            owner = 0 if begin is None else begin.data_ptr()
            self._launch("sum_feedback", own, table, *words, *left, owner, bits=bits)

    def _words(self, table: StretchTable, device: torch.device) -> Tensor:
        """Return the rows of ``table`` on ``device``, ready for the current stream."""
        if device.type != "cuda":
            return table.on(device, 0)
        if torch.cuda.is_current_stream_capturing():
            self._captured.add(table)
        return table.on(device, _stream(device.index))

    def _launch_near(
        self, kernel: str, like: Tensor, table: StretchTable, ranks: int, *words: int
    ) -> None:
        """Launch with the rows passed by value, if they are few, to avoid a copy to the device."""
        if not table.tiles:
            return
        near = table.near or table.far(self._words(table, like.device))
        image, name = image_of(self._setting, f"planned_{kernel}", like.dtype)
        grid = (ceil_div(table.tiles, WARPS), ranks)
        self._launcher.launch("blockint_table.cu", image, name, grid, *words, table=near)

    def _launch(
        self, kernel: str, like: Tensor, table: StretchTable, *words: int, bits: int
    ) -> None:
        if not table.tiles:
            return
        image, name = image_of(self._setting, f"planned_{kernel}", like.dtype, bits)
        source, threads = _BLOCKS[kernel.startswith("sum")]
        self._launcher.launch(
            source, image, name, (ceil_div(32 * table.tiles, threads), 1),
            self._words(table, like.device).data_ptr(), len(table), *words, threads=threads,
        )  # fmt: skip


#: source file and threads per block, for sums (True) and for other kernels
_BLOCKS = {True: ("blockint_sum.cu", SUM_THREADS), False: ("blockint_table.cu", 32 * WARPS)}
