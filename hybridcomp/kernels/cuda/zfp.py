"""Launch zfp's kernels."""

from __future__ import annotations

from hybridcomp.kernels.cuda.functions import CudaFunctions
from hybridcomp.kernels.cuda.launcher import DTYPES, THREADS, ceil_div


class ZfpOnCuda(CudaFunctions):
    """``FixedKernels`` on a GPU: the setting is the bits of a block of 4 values."""

    def encode(
        self, maxbits: int, dtype: int, values: int, numel: int, out: int, nbytes: int,
        threads: int, /,
    ) -> None:  # fmt: skip
        """Encode, a thread for four blocks of 4 values."""
        self._fixed(
            "zfp.cu", (), f"zfp_encode_{DTYPES[dtype]}", out, ceil_div(numel, 16 * THREADS),
            (values, numel, maxbits, out),
        )  # fmt: skip

    def decode(
        self, maxbits: int, dtype: int, payload: int, nbytes: int, out: int, numel: int, add: bool,
        threads: int, /,
    ) -> None:  # fmt: skip
        """Decode, a thread for four blocks."""
        self._fixed(
            "zfp.cu", (), "zfp_add" if add else f"zfp_decode_{DTYPES[dtype]}", payload,
            ceil_div(numel, 16 * THREADS), (payload, numel, maxbits, out),
        )  # fmt: skip
