"""Launch the kernels of few-bit residuals alone, without encoding anything."""

from __future__ import annotations

from hybridcomp.kernels.cuda.functions import CudaFunctions
from hybridcomp.kernels.cuda.launcher import WARPS, ceil_div


class ResidualOnCuda(CudaFunctions):
    """``codecs.quantized_residual.ResidualKernels``, a warp for 1024 values."""

    def load(self, bits: int, levels: int, steps: int, numel: int, out: int, threads: int) -> None:
        """Write ``numel`` values as fp32 to ``out``."""
        self._start("residual_load", bits, levels, numel, (levels, steps, numel, out))

    def store(
        self, bits: int, values: int, numel: int, levels: int, steps: int, threads: int
    ) -> None:
        """Quantize ``numel`` fp32 values, NaN and Inf as 0."""
        self._start("residual_store", bits, levels, numel, (values, numel, levels, steps))

    def _start(
        self, kernel: str, bits: int, levels: int, numel: int, words: tuple[int, ...]
    ) -> None:
        blocks = ceil_div(numel, 1024 * WARPS)
        self._fixed("residual.cu", (f"HC_KEPT={bits}",), kernel, levels, blocks, words)
