"""Casts: bf16, fp16, and fp8 with one fp32 scale per block of 4096 values.

Narrowing rounds to nearest even. Finite values that would overflow become the largest finite value,
so a decoded NaN or Inf was already in the input. The formats are in ``kernels/formats/casts.h``.
"""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar, Literal, Protocol, get_args

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec, FixedCodec, align
from hybridcomp.codecs.checks import check_add, check_decode, check_dtype, check_encode
from hybridcomp.codecs.setting import Setting
from hybridcomp.kernels import DTYPE_CODES, FixedKernels, KernelSet

ABOUT = "casts"
#: 8-bit floats: bits of exponent and mantissa
Format = Literal["e4m3", "e5m2"]


class CastKernels(Protocol):
    """Kernels of the casts on every back end."""

    def cast(
        self, source: int, to: int, values: int, out: int, numel: int, add: bool, threads: int, /
    ) -> None:
        """Convert between dtypes, saturating; ``source`` and ``to`` are dtype codes.

        ``add`` accumulates into fp32.
        """


KERNELS = KernelSet[CastKernels]("casts")


class Cast(Codec):
    """Cast to another dtype; exact for values of that dtype."""

    about: ClassVar[str] = ABOUT
    lossless = False
    fixed_size = True
    _dtype: ClassVar[torch.dtype]

    @property
    def spec(self) -> str:
        return self.name

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        check_dtype(self.spec, dtype)
        return align(self._dtype.itemsize * numel)

    def encode(self, values: Tensor, out: Tensor) -> int:
        nbytes = self.wire_nbytes(values.numel(), values.dtype)
        check_encode(self.spec, values, out, nbytes)
        KERNELS.on(values.device).cast(
            DTYPE_CODES[values.dtype],
            DTYPE_CODES[self._dtype],
            values.data_ptr(),
            out.data_ptr(),
            values.numel(),
            False,
            torch.get_num_threads(),
        )
        used = self._dtype.itemsize * values.numel()
        if used < nbytes:
            out[used:nbytes].zero_()
        return nbytes

    def decode(self, payload: Tensor, out: Tensor) -> None:
        self._decode(payload, out, add=False)

    def decode_add(self, payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
        check_add(self.spec, out, dtype)
        self._decode(payload, out, add=True)

    def _decode(self, payload: Tensor, out: Tensor, *, add: bool) -> None:
        check_decode(self.spec, payload, out, self.wire_nbytes(out.numel(), out.dtype))
        KERNELS.on(out.device).cast(
            DTYPE_CODES[self._dtype],
            DTYPE_CODES[out.dtype],
            payload.data_ptr(),
            out.data_ptr(),
            out.numel(),
            add,
            torch.get_num_threads(),
        )


class Bf16(Cast):
    """bfloat16: 8 significant bits, the range of fp32."""

    name: ClassVar[str] = "bf16"
    _dtype = torch.bfloat16

    @classmethod
    def ladder(cls) -> tuple[Bf16, ...]:
        return (cls(),)

    def element_bound(self, absmax: float, dtype: torch.dtype) -> float:
        check_dtype(self.spec, dtype)
        return 0.0 if dtype == torch.bfloat16 else max(absmax * 2.0**-8, 2.0**-134)


class Fp16(Cast):
    """float16: 11 significant bits, from 2^-24 to 65504; larger values become 65504."""

    name: ClassVar[str] = "fp16"
    _dtype = torch.float16

    @classmethod
    def ladder(cls) -> tuple[Fp16, ...]:
        return (cls(),)

    def element_bound(self, absmax: float, dtype: torch.dtype) -> float:
        check_dtype(self.spec, dtype)
        if dtype == torch.float16:
            return 0.0
        return max(absmax * 2.0**-11, 2.0**-25, absmax - torch.finfo(torch.float16).max)


class Fp8(FixedCodec):
    """8-bit floats of a block scaled to its absmax: 8.01 bits a value.

    A NaN or Inf becomes NaN and leaves its neighbours alone.

    Args:
        format: ``"e4m3"`` (3 mantissa bits) or ``"e5m2"`` (2 mantissa bits, wider range).

    Raises:
        CodecError: ``format`` is neither of these.
    """

    name: ClassVar[str] = "fp8"
    about: ClassVar[str] = ABOUT
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(
            "format",
            Format,
            "fp8: e4m3 (default; more mantissa) or e5m2 (more range within a block).",
        ),
    )
    BLOCK: ClassVar[int] = 4096
    block_size: int = BLOCK
    kernels = KernelSet[FixedKernels](name)

    def __init__(self, format: Format = "e4m3") -> None:
        self.check_settings(format=format)
        self.format = format

    @classmethod
    def ladder(cls) -> tuple[Fp8, ...]:
        return (cls(),)

    @cached_property
    def spec(self) -> str:
        return f"fp8(format={self.format})"

    @property
    def _setting(self) -> int:
        return get_args(Format).index(self.format)

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        check_dtype(self.spec, dtype)
        return align(-(-numel // 4) * 4 + 4 * -(-numel // self.BLOCK))

    def element_bound(self, absmax: float, dtype: torch.dtype) -> float:
        """Return the largest error of an element whose aligned block has this finite absmax."""
        check_dtype(self.spec, dtype)
        # half a unit of the top binade: 16 of 448, 4096 of 57344
        half_unit = 1.0001 / (28 if self.format == "e4m3" else 14)
        return half_unit * max(absmax, 2.0**-90)


#: by dtype: the codec that keeps its values exactly
CAST_TO: dict[torch.dtype, Codec] = {torch.bfloat16: Bf16(), torch.float16: Fp16()}
