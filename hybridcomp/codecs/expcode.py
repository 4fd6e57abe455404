"""expcode: lossless; exponents as short codes of one length, the rest as it is.

The format is at the top of ``kernels/expcode.h``.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hybridcomp.codecs._checks import check_add, check_decode, check_dtype, check_encode
from hybridcomp.codecs.base import Codec, align
from hybridcomp.errors import CodecError
from hybridcomp.kernels import DTYPE_CODES, kernels_of

BLOCK, TILE = 32, 2048
HEADER, TILE_HEADER = 32, 4


def _largest_tile(numel: int, dtype: torch.dtype) -> int:
    """As in kernels/cpu_expcode.cpp: codes as wide as exponents, and a mask."""
    blocks = -(-numel // BLOCK)
    return -(-(TILE_HEADER + -(-blocks // 8) + blocks * BLOCK * dtype.itemsize) // 4) * 4


class ExpCode(Codec):
    """Lossless, variable size: about 11.2 bits a value on bf16, 14.2 on fp16, 27.2 on fp32.

    Blocks of 32 zeros cost a bit. Values that do not compress cost a tenth of a bit a value more
    than they are long.
    """

    name: ClassVar[str] = "expcode"
    lossless = True
    fixed_size = False

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

    def encode(self, values: Tensor, out: Tensor) -> int:
        nbytes = self.wire_nbytes(values.numel(), values.dtype)
        check_encode(self.spec, values, out, nbytes)
        return kernels_of(values.device).expcode_encode(
            DTYPE_CODES[values.dtype],
            values.data_ptr(),
            values.numel(),
            out.data_ptr(),
            nbytes,
            torch.get_num_threads(),
        )

    def decode(self, payload: Tensor, out: Tensor) -> None:
        self._decode(payload, out, out.dtype, add=False)

    def decode_add(self, payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
        check_add(self.spec, out, dtype)
        self._decode(payload, out, dtype, add=True)

    def _decode(self, payload: Tensor, out: Tensor, dtype: torch.dtype, *, add: bool) -> None:
        # the smallest payload there is; the kernel checks the rest against header and offsets
        check_decode(self.spec, payload, out, align(HEADER + 4) if out.numel() else 0)
        try:
            kernels_of(out.device).expcode_decode(
                DTYPE_CODES[dtype],
                payload.data_ptr(),
                payload.numel(),
                out.data_ptr(),
                out.numel(),
                add,
                torch.get_num_threads(),
            )
        except ValueError as error:
            raise CodecError(
                f"{self.spec}: cannot decode {out.numel()} {dtype}: {error}"
            ) from error

    def element_bound(self, absmax: float, dtype: torch.dtype) -> float:
        check_dtype(self.spec, dtype)
        return 0.0
