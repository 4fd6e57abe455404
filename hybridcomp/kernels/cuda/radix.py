"""Launch radix's kernels."""

from __future__ import annotations

import struct

from hybridcomp.kernels.cuda.functions import CudaFunctions
from hybridcomp.kernels.cuda.launcher import DTYPES, ceil_div


class RadixOnCuda(CudaFunctions):
    """``VariableKernels`` on a GPU; settings: segment, whether relative, error bound."""

    def encode(
        self, segment: int, relative: bool, bound: float, dtype: int, values: int, numel: int,
        out: int, nbytes: int, threads: int, size: int = 0, /,
    ) -> int:  # fmt: skip
        """Encode, a thread block for two segments, which look back together."""
        words = (values, numel, segment, _float_bits(bound), int(relative), dtype, out)
        tiles = ceil_div(numel, 2 * segment)
        return self._variable("radix.cu", f"radix_encode_{DTYPES[dtype]}", out, tiles, words, size)

    def decode(
        self, segment: int, relative: bool, bound: float, dtype: int, payload: int, nbytes: int,
        out: int, numel: int, add: bool, threads: int, /,
    ) -> None:  # fmt: skip
        """Decode, half as many threads a segment for 16-bit values. ``check`` reports damage."""
        self._fixed(
            "radix.cu", (), "radix_add" if add else f"radix_decode_{DTYPES[dtype]}", payload,
            ceil_div(numel, segment),
            (payload, nbytes, numel, segment, _float_bits(bound), int(relative), out,
             self._damage.word.data_ptr()),
            threads=256 if add or dtype == 0 else 128,
        )  # fmt: skip


def _float_bits(value: float) -> int:
    word: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return word
