"""mpc: the lossless codec of the paper (MPC v1.2 by Burtscher et al.), for fp32 and 16-bit pairs.

The stream is described at the top of ``kernels/mpc.h``.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hybridcomp.codecs._checks import check_add, check_decode, check_dtype, check_encode
from hybridcomp.codecs.base import Codec, align
from hybridcomp.errors import CodecError
from hybridcomp.kernels import DTYPE_CODES, kernels_of

GROUP = 32
HEADER_WORDS = 2


class Mpc(Codec):
    """Lossless, variable size: about 29 bits a value on fp32 gradients, 12.5 on bf16 ones.

    Values that do not compress cost at most 1/32 more than they are long, and 8 bytes.

    Args:
        dim: stride of the differences in 32-bit words, 1..32.

    Raises:
        CodecError: ``dim`` is not an integer from 1 to 32.
    """

    name: ClassVar[str] = "mpc"
    lossless = True
    fixed_size = False

    def __init__(self, dim: int = 1) -> None:
        if isinstance(dim, bool) or not isinstance(dim, int) or not 1 <= dim <= 32:
            raise CodecError(f"mpc: dim must be an integer from 1 to 32, found {dim!r}")
        self.dim = dim

    @property
    def spec(self) -> str:
        return f"mpc(dim={self.dim})"

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        check_dtype(self.spec, dtype)
        if numel >= 2**32:
            raise CodecError(f"{self.spec}: the format holds fewer than 2^32 values, found {numel}")
        groups = -(-numel * dtype.itemsize // (4 * GROUP))
        return align(4 * (HEADER_WORDS + groups + GROUP * groups + 1)) if numel else 0

    def encode(self, values: Tensor, out: Tensor) -> int:
        nbytes = self.wire_nbytes(values.numel(), values.dtype)
        check_encode(self.spec, values, out, nbytes)
        return kernels_of(values.device).mpc_encode(
            self.dim,
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
        # the smallest payload there is; the kernel checks the rest against header and bitmap
        check_decode(self.spec, payload, out, align(4 * HEADER_WORDS) if out.numel() else 0)
        try:
            kernels_of(out.device).mpc_decode(
                self.dim,
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
