"""expcode: lossless; exponents as short codes of one length, the other bits unchanged.

The format is at the top of ``kernels/formats/expcode.h``.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from hybridcomp.codecs._variable import LosslessCodec
from hybridcomp.codecs.base import align
from hybridcomp.codecs.checks import check_count, check_dtype
from hybridcomp.kernels import KernelSet, VariableKernels

BLOCK, TILE = 32, 2048
HEADER, TILE_HEADER = 32, 4


def _largest_tile(numel: int, dtype: torch.dtype) -> int:
    """Return the most bytes of a tile, as in kernels/cpu: codes of full width and a mask."""
    blocks = -(-numel // BLOCK)
    return -(-(TILE_HEADER + -(-blocks // 8) + blocks * BLOCK * dtype.itemsize) // 4) * 4


class ExpCode(LosslessCodec):
    """Lossless, variable size: about 11.2 bits a value on bf16, 14.2 on fp16, 27.2 on fp32.

    A block of 32 zeros costs one bit. An incompressible value takes 0.1 bit more than unencoded.
    """

    name: ClassVar[str] = "expcode"
    remark: ClassVar[str] = "expcode saves more"
    kernels = KernelSet[VariableKernels](name)

    @property
    def spec(self) -> str:
        return "expcode()"

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        check_dtype(self.spec, dtype)
        check_count(self.spec, numel)
        if numel == 0:
            return 0
        tiles = -(-numel // TILE)
        last = numel - (tiles - 1) * TILE
        most = (tiles - 1) * _largest_tile(TILE, dtype) + _largest_tile(last, dtype)
        return align(HEADER + 4 * tiles + most)

    @property
    def _settings(self) -> tuple[int, ...]:
        return ()

    @property
    def _least_nbytes(self) -> int:
        return align(HEADER + 4)
