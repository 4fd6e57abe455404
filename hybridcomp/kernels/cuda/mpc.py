"""Launch mpc's kernels."""

from __future__ import annotations

from hybridcomp.kernels.cuda.functions import CudaFunctions
from hybridcomp.kernels.cuda.launcher import WARPS, ceil_div


class MpcOnCuda(CudaFunctions):
    """``VariableKernels`` on a GPU; the setting is the stride of the differences."""

    def encode(
        self, dim: int, dtype: int, values: int, numel: int, out: int, nbytes: int, threads: int,
        size: int = 0, /,
    ) -> int:  # fmt: skip
        """Encode, one warp for each chunk of 1024 words."""
        words = numel if dtype == 0 else ceil_div(numel, 2)
        tiles = ceil_div(words, 1024 * WARPS)
        arguments = (values, numel, dim, dtype, out)
        return self._variable("mpc.cu", "mpc_encode", out, tiles, arguments, size)

    def decode(
        self, dim: int, dtype: int, payload: int, nbytes: int, out: int, numel: int, add: bool,
        threads: int, /,
    ) -> None:  # fmt: skip
        """Decode, one warp for each chunk. ``check`` reports damage."""
        words = numel if dtype == 0 else ceil_div(numel, 2)
        tiles = ceil_div(words, 1024 * WARPS)
        work = self._launcher.zeros(1 + tiles)
        self._fixed(
            "mpc.cu", (), "mpc_add" if add else "mpc_decode", payload, tiles,
            (payload, nbytes, numel, dim, dtype, out, work.data_ptr(),
             self._damage.word.data_ptr()),
        )  # fmt: skip
