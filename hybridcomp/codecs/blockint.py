"""blockint: symmetric integers of 2..8 bits, one 8-bit log scale per block of 32 values.

The format and the argument for its bound are at the top of ``kernels/blockint.h``.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from hybridcomp.codecs._checks import check_dtype
from hybridcomp.codecs._fixed import FixedCodec
from hybridcomp.codecs.base import align
from hybridcomp.errors import CodecError
from hybridcomp.kernels import FixedDecode, FixedEncode, kernels_of

BLOCK = 32
TILE = 1024
#: smallest top of a block: what lies under half a step of it becomes zero
SMALLEST_TOP = 1.125 * 2.0**-110


class BlockInt(FixedCodec):
    """``bits`` + 0.26 bits a value; on Gaussian values 0.6 % relative error at 8 bits, 10 % at 4.

    A NaN or Inf makes its block of 32 values NaN. Errors are bounded by the absmax of the aligned
    tile of 1024 values, see :meth:`element_bound`.

    Args:
        bits: bits of a level, 2..8.

    Raises:
        CodecError: ``bits`` is not an integer from 2 to 8.
    """

    name: ClassVar[str] = "blockint"
    span: ClassVar[int] = TILE

    def __init__(self, bits: int = 8) -> None:
        if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
            raise CodecError(f"blockint: bits must be an integer from 2 to 8, found {bits!r}")
        self.bits = bits

    @property
    def spec(self) -> str:
        return f"blockint(bits={self.bits})"

    @property
    def _setting(self) -> int:
        return self.bits

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        check_dtype(self.spec, dtype)
        blocks, tiles = -(-numel // BLOCK), -(-numel // TILE)
        return align(blocks * (4 * self.bits + 1) + tiles)

    def _encode_kernel(self, device: torch.device) -> FixedEncode:
        return kernels_of(device).blockint_encode

    def _decode_kernel(self, device: torch.device) -> FixedDecode:
        return kernels_of(device).blockint_decode

    def element_bound(self, absmax: float, dtype: torch.dtype) -> float:
        """Largest error of an element whose aligned tile of 1024 values has this finite absmax."""
        check_dtype(self.spec, dtype)
        # half a step; the last digit covers the roundings of the scale, its inverse and products
        levels: int = 2 ** (self.bits - 1) - 1
        return 0.5001 / levels * max(absmax * 17 / 16, SMALLEST_TOP)
