"""Launch expcode's kernels."""

from __future__ import annotations

from collections.abc import Sequence

from hybridcomp.kernels.cuda.launcher import DTYPES, ceil_div
from hybridcomp.kernels.cuda.pieces import CudaPieces
from hybridcomp.kernels.pieces import PayloadPiece

TILE = 2048

#: warps per thread block of expcode.cu, by dtype code: each warp has a tile in shared memory
EXPCODE_ENCODE_WARPS = (4, 8, 8)
EXPCODE_DECODE_WARPS = (4, 2, 2)


class ExpCodeOnCuda(CudaPieces):
    """``VariableKernels`` and ``PieceFunctions`` on a GPU; no settings."""

    def encode(
        self, dtype: int, values: int, numel: int, out: int, nbytes: int, threads: int,
        size: int = 0, /,
    ) -> int:  # fmt: skip
        """Encode, one warp for each tile of 2048 values."""
        kernel, words = f"expcode_encode_{DTYPES[dtype]}", (values, numel, dtype, out)
        warps = EXPCODE_ENCODE_WARPS[dtype]
        groups = ceil_div(numel, TILE * warps)
        return self._variable("expcode.cu", kernel, out, groups, words, size, 32 * warps)

    def decode(
        self, dtype: int, payload: int, nbytes: int, out: int, numel: int, add: bool,
        threads: int, /,
    ) -> None:  # fmt: skip
        """Decode, one warp for each tile. ``check`` reports damage."""
        warps = EXPCODE_DECODE_WARPS[dtype]
        self._fixed(
            "expcode.cu", (), f"expcode_{'add' if add else 'decode'}_{DTYPES[dtype]}", payload,
            ceil_div(numel, TILE * warps),
            (payload, nbytes, numel, dtype, out, self._damage.word.data_ptr()), 32 * warps,
        )  # fmt: skip

    def encode_pieces(self, dtype: int, /, *, pieces: Sequence[PayloadPiece]) -> None:
        """Encode all pieces in one launch."""
        kernel, warps = f"expcode_encode_{DTYPES[dtype]}", EXPCODE_ENCODE_WARPS[dtype]
        step, threads = TILE * warps, 32 * warps
        self._encode_all("expcode.cu", kernel, pieces, step, dtype, threads=threads)

    def decode_pieces(
        self, dtype: int, /, *, pieces: Sequence[PayloadPiece], ranks: int = 1, add: bool = False
    ) -> None:
        """Decode all pieces in one launch. ``check`` reports damage."""
        kernel = f"expcode_{'add' if add else 'decode'}_{DTYPES[dtype]}"
        warps = EXPCODE_DECODE_WARPS[dtype]
        step, threads = TILE * warps, 32 * warps
        self._decode_all("expcode.cu", kernel, pieces, step, dtype, ranks=ranks, threads=threads)
