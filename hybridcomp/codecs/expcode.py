"""expcode: lossless; exponents as short codes of one length, the rest as it is.

The format is at the top of ``kernels/formats/expcode.h``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch

from hybridcomp.codecs._lossless import LosslessCodec
from hybridcomp.codecs.base import align, check_dtype
from hybridcomp.errors import CodecError
from hybridcomp.kernels import kernels_of

BLOCK, TILE = 32, 2048
HEADER, TILE_HEADER = 32, 4


def _largest_tile(numel: int, dtype: torch.dtype) -> int:
    """The largest tile, as kernels/cpu has it: codes as wide as exponents, and a mask."""
    blocks = -(-numel // BLOCK)
    return -(-(TILE_HEADER + -(-blocks // 8) + blocks * BLOCK * dtype.itemsize) // 4) * 4


class ExpCode(LosslessCodec):
    """Lossless, variable size: about 11.2 bits a value on bf16, 14.2 on fp16, 27.2 on fp32.

    Blocks of 32 zeros cost a bit. Values that do not compress cost a tenth of a bit a value more
    than they are long.
    """

    name: ClassVar[str] = "expcode"
    remark: ClassVar[str] = "expcode saves more"

    @property
    def spec(self) -> str:
        return "expcode()"

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        check_dtype(self.spec, dtype)
        if numel >= 2**32:
            raise CodecError(f"{self.spec}: the format holds fewer than 2^32 values, found {numel}")
        if numel == 0:
            return 0
        tiles = -(-numel // TILE)
        last = numel - (tiles - 1) * TILE
        most = (tiles - 1) * _largest_tile(TILE, dtype) + _largest_tile(last, dtype)
        return align(HEADER + 4 * tiles + most)

    def _kernels(self, device: torch.device) -> tuple[Callable[..., int], Callable[..., None]]:
        kernels = kernels_of(device)
        return kernels.expcode_encode, kernels.expcode_decode

    @property
    def _settings(self) -> tuple[int, ...]:
        return ()

    @property
    def _least_nbytes(self) -> int:
        return align(HEADER + 4)
