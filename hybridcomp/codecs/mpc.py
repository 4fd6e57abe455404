"""mpc: the lossless codec of the paper (MPC v1.2 by Burtscher et al.), for fp32 and 16-bit pairs.

The stream is described at the top of ``kernels/formats/mpc.h``.
"""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import torch

from hybridcomp.codecs._variable import LosslessCodec
from hybridcomp.codecs.base import align
from hybridcomp.codecs.checks import check_count, check_dtype
from hybridcomp.codecs.setting import Setting
from hybridcomp.kernels import KernelSet, VariableKernels

GROUP = 32
HEADER_WORDS = 2


class Mpc(LosslessCodec):
    """Lossless, variable size: about 29 bits a value on fp32 gradients, 12.5 on bf16 ones.

    Incompressible values take at most 1/32 more than unencoded, plus 8 bytes.

    Args:
        dim: stride of the differences in 32-bit words, 1..32.

    Raises:
        CodecError: ``dim`` is not an integer from 1 to 32.
    """

    name: ClassVar[str] = "mpc"
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(
            "dim",
            int,
            "mpc: stride of the differences in 32-bit words, 1 (default) to 32: the number of "
            "fields where records are interleaved.",
            least=1,
            most=32,
        ),
    )
    kernels = KernelSet[VariableKernels](name)

    def __init__(self, dim: int = 1) -> None:
        self.check_settings(dim=dim)
        self.dim = dim

    @cached_property
    def spec(self) -> str:
        return f"mpc(dim={self.dim})"

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        check_dtype(self.spec, dtype)
        check_count(self.spec, numel)
        groups = -(-numel * dtype.itemsize // (4 * GROUP))
        return align(4 * (HEADER_WORDS + groups + GROUP * groups + 1)) if numel else 0

    @property
    def _settings(self) -> tuple[int, ...]:
        return (self.dim,)

    @property
    def _least_nbytes(self) -> int:
        return align(4 * HEADER_WORDS)
