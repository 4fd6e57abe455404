"""Launch the kernels of casts between dtypes."""

from __future__ import annotations

from hybridcomp.kernels.cuda.functions import CudaFunctions
from hybridcomp.kernels.cuda.launcher import DTYPES, THREADS, ceil_div


class CastsOnCuda(CudaFunctions):
    """``codecs.casts.CastKernels`` on a GPU."""

    def cast(
        self, source: int, to: int, values: int, out: int, numel: int, add: bool, threads: int, /
    ) -> None:
        """Cast eight values a thread; between equal dtypes copy 32 bytes, NaN payloads included."""
        name, count, each = f"cast_{DTYPES[source]}_{DTYPES[to]}", numel, 8
        if add:
            name = f"add_{DTYPES[source]}"
        elif source == to:
            name, count, each = "cast_copy", numel * (4 if source == 0 else 2), 32
        if numel:
            grid = (ceil_div(count, each * THREADS), 1)
            self._launcher.launch("casts.cu", (), name, grid, values, count, out)
