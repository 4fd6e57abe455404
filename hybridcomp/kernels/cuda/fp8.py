"""Launch fp8's kernels."""

from __future__ import annotations

from hybridcomp.kernels.cuda.functions import CudaFunctions
from hybridcomp.kernels.cuda.launcher import DTYPES, ceil_div

FORMATS = ("e4m3", "e5m2")


class Fp8OnCuda(CudaFunctions):
    """``FixedKernels`` on a GPU: the setting is the index of the format."""

    def encode(
        self, form: int, dtype: int, values: int, numel: int, out: int, nbytes: int, threads: int, /
    ) -> None:
        """Encode, 256 threads for each block of 4096 values."""
        self._fixed(
            "casts.cu", (), f"fp8_{FORMATS[form]}_encode_{DTYPES[dtype]}", out,
            ceil_div(numel, 4096), (values, numel, out),
        )  # fmt: skip

    def decode(
        self, form: int, dtype: int, payload: int, nbytes: int, out: int, numel: int, add: bool,
        threads: int, /,
    ) -> None:  # fmt: skip
        """Decode, 256 threads for each block of 4096 values."""
        name = f"fp8_{FORMATS[form]}_" + ("add" if add else f"decode_{DTYPES[dtype]}")
        words = (payload, numel, out)
        self._fixed("casts.cu", (), name, payload, ceil_div(numel, 4096), words)
