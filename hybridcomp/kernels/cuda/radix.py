"""Launch radix's kernels."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from hybridcomp.kernels.cuda.launcher import DTYPES, THREADS, ceil_div
from hybridcomp.kernels.cuda.pieces import CudaPieces
from hybridcomp.kernels.pieces import PayloadPiece


class RadixOnCuda(CudaPieces):
    """``VariableKernels`` and ``PieceFunctions`` on a GPU.

    Settings: segment, whether relative, error bound.
    """

    def encode(
        self, segment: int, relative: bool, bound: float, dtype: int, values: int, numel: int,
        out: int, nbytes: int, threads: int, size: int = 0, /,
    ) -> int:  # fmt: skip
        """Encode, a thread block for every two segments; a block looks back only once."""
        words = (values, numel, segment, _float_bits(bound), int(relative), dtype, out)
        tiles = ceil_div(numel, 2 * segment)
        return self._variable("radix.cu", f"radix_encode_{DTYPES[dtype]}", out, tiles, words, size)

    def decode(
        self, segment: int, relative: bool, bound: float, dtype: int, payload: int, nbytes: int,
        out: int, numel: int, add: bool, threads: int, /,
    ) -> None:  # fmt: skip
        """Decode, with half as many threads per segment for 16-bit values.

        ``check`` reports damage.
        """
        self._fixed(
            "radix.cu", (), "radix_add" if add else f"radix_decode_{DTYPES[dtype]}", payload,
            ceil_div(numel, segment),
            (payload, nbytes, numel, segment, _float_bits(bound), int(relative), out,
             self._damage.word.data_ptr()),
            threads=_decoding_threads(dtype, add),
        )  # fmt: skip

    def encode_pieces(
        self, segment: int, relative: bool, bound: float, dtype: int, /, *,
        pieces: Sequence[PayloadPiece],
    ) -> None:  # fmt: skip
        """Encode all pieces in one launch."""
        words = (segment, _float_bits(bound), int(relative), dtype)
        kernel = f"radix_encode_{DTYPES[dtype]}"
        self._encode_all("radix.cu", kernel, pieces, 2 * segment, *words)

    def decode_pieces(
        self, segment: int, relative: bool, bound: float, dtype: int, /, *,
        pieces: Sequence[PayloadPiece], ranks: int = 1, add: bool = False,
    ) -> None:  # fmt: skip
        """Decode all pieces in one launch. ``check`` reports damage."""
        kernel = "radix_add" if add else f"radix_decode_{DTYPES[dtype]}"
        words, threads = (segment, _float_bits(bound), int(relative)), _decoding_threads(dtype, add)
        self._decode_all("radix.cu", kernel, pieces, segment, *words, ranks=ranks, threads=threads)


def _decoding_threads(dtype: int, add: bool) -> int:
    """Return the threads per segment."""
    return THREADS if add or dtype == 0 else THREADS // 2


def _float_bits(value: float) -> int:
    word: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return word
