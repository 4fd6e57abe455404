"""Launch mpc's kernels."""

from __future__ import annotations

from collections.abc import Sequence

from hybridcomp.kernels.cuda.launcher import WARPS, ceil_div
from hybridcomp.kernels.cuda.pieces import CudaPieces
from hybridcomp.kernels.pieces import PayloadPiece

CHUNK = 1024  # 32-bit words per chunk


class MpcOnCuda(CudaPieces):
    """``VariableKernels`` and ``PieceFunctions`` on a GPU; the setting is the stride."""

    def encode(
        self, dim: int, dtype: int, values: int, numel: int, out: int, nbytes: int, threads: int,
        size: int = 0, /,
    ) -> int:  # fmt: skip
        """Encode, one warp for each chunk of 1024 words."""
        words = numel if dtype == 0 else ceil_div(numel, 2)
        tiles = ceil_div(words, CHUNK * WARPS)
        arguments = (values, numel, dim, dtype, out)
        return self._variable("mpc.cu", "mpc_encode", out, tiles, arguments, size)

    def decode(
        self, dim: int, dtype: int, payload: int, nbytes: int, out: int, numel: int, add: bool,
        threads: int, /,
    ) -> None:  # fmt: skip
        """Decode, one warp for each chunk. ``check`` reports damage."""
        words = numel if dtype == 0 else ceil_div(numel, 2)
        tiles = ceil_div(words, CHUNK * WARPS)
        work = self._launcher.zeros(1 + tiles)
        self._fixed(
            "mpc.cu", (), "mpc_add" if add else "mpc_decode", payload, tiles,
            (payload, nbytes, numel, dim, dtype, out, work.data_ptr(),
             self._damage.word.data_ptr()),
        )  # fmt: skip

    def encode_pieces(self, dim: int, dtype: int, /, *, pieces: Sequence[PayloadPiece]) -> None:
        """Encode all pieces in one launch."""
        self._encode_all("mpc.cu", "mpc_encode", pieces, _step(dtype), dim, dtype)

    def decode_pieces(
        self, dim: int, dtype: int, /, *, pieces: Sequence[PayloadPiece], ranks: int = 1,
        add: bool = False,
    ) -> None:  # fmt: skip
        """Decode all pieces in one launch. ``check`` reports damage."""
        kernel, step = "mpc_add" if add else "mpc_decode", _step(dtype)
        self._decode_all("mpc.cu", kernel, pieces, step, dim, dtype, ranks=ranks, looks=True)


def _step(dtype: int) -> int:
    """Return the number of values per thread block."""
    return CHUNK * WARPS * (1 if dtype == 0 else 2)
