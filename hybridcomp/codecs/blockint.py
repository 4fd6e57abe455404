"""blockint: symmetric integers of 2..8 bits, one 8-bit log scale per block of 32 values.

The format and the argument for its bound are at the top of ``kernels/formats/blockint.h``.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from hybridcomp.codecs.base import (
    PAYLOAD_ALIGN,
    VALUE_DTYPES,
    CollectiveKernel,
    FixedCodec,
    Lengths,
    MultiTensorKernel,
    PlannedKernel,
)
from hybridcomp.codecs.checks import check_dtype, check_encode
from hybridcomp.codecs.quantized_residual import QuantizedResidual
from hybridcomp.codecs.setting import Setting
from hybridcomp.errors import CodecError
from hybridcomp.kernels import DTYPE_CODES, FixedKernels, KernelSet, on_host

BLOCK = 32
TILE = 1024
#: smallest top of a block; values below half a quantization step of it become zero
SMALLEST_TOP = 1.125 * 2.0**-110
#: values that are rotated together (kernels/formats/rotation.h)
ROTATION = 64
#: largest ``bits`` that allows rotation: above, one more bit costs less than the rotation
ROTATION_BITS = 4
#: ``bits`` with which levels need not be uniform
SPACED_BITS = 4

#: spacing of a block's levels
Levels = Literal["uniform", "gaussian", "lloyd"]
#: kernel setting bit of each spacing, and its number of levels
_SPACINGS: dict[Levels, tuple[int, int]] = {"gaussian": (32, 16), "lloyd": (128, 15)}
#: largest error of a spacing over its block's largest magnitude (kernels/formats/blockint.h)
_SHARES: dict[Levels, float] = {"gaussian": 0.0925, "lloyd": 0.1037}
#: which of the two levels around a value is sent
Rounding = Literal["nearest", "random"]

SETTINGS = (
    Setting(
        "bits", int,
        "blockint: bits of one value, 2 to 8 (default). More: smaller error, larger messages.",
        least=2, most=8, ramp_step=1,
    ),
    Setting(
        "rotate", bool,
        "blockint, at 4 bits and fewer: rotate every 64 values (Walsh-Hadamard) before they are "
        "encoded, which spreads outliers. Half the speed; default false.",
        no_bound="spreads errors over 64 values and keeps no bound",
    ),
    Setting(
        "levels", Levels,
        "blockint at 4 bits: lloyd has 15 levels, zero among them, where Gaussian values gather: "
        "errors a seventh smaller. gaussian has 16: errors a sixth smaller, but zeros become "
        "small numbers. Default uniform.",
        beside=(("bits", SPACED_BITS), ("rounding", "nearest")),
    ),
    Setting(
        "rounding", Rounding,
        "blockint: random is stochastic rounding, by which small values arrive over many steps "
        "without state; errors of up to a whole step, not half of one. Default nearest.",
    ),
)  # fmt: skip


class BlockInt(FixedCodec):
    """``bits`` + 0.26 bits a value; on Gaussian values 0.6 % relative error at 8 bits, 10 % at 4.

    A NaN or Inf makes its block of 32 values NaN, with ``rotate`` its group of 64. Errors are
    bounded by the absmax of the aligned tile of 1024 values, see :meth:`element_bound`.

    Args:
        bits: bits of a level, 2..8.
        rotate: Walsh-Hadamard rotation of every 64 values; for 4 bits and fewer. Spreads outliers:
            with channels that are 30 times larger the relative error at 4 bits falls from 16 % to
            7 %. Near-Gaussian values lose nothing at 4 bits, 4 % at 3 and 8 % at 2 bits (where
            outliers lose more); sparse ones lose their zeros.
        levels: "gaussian" for sixteen levels where Gaussian values gather; 4 bits only. The
            relative error at 4 bits is 8 % on Gaussian values, and 17 % smaller than that of
            uniform levels on average over training tensors. Zeros beside other values come back
            as 5 % of their block's absmax. "lloyd" for fifteen levels with a zero and the better
            of two scales, 4 bits only: 8.6 % on Gaussian values, and zeros stay zeros.
        rounding: "random" for errors with a mean of zero, with uniform levels only. The randomness
            is a hash of value, index and scale (kernels/formats/dither.h): there is no state, and
            equal messages have equal bytes. The relative error is 1.4 times as large, its bound
            twice.

    Raises:
        CodecError: a setting is out of range, or does not go with ``bits``.
    """

    name: ClassVar[str] = "blockint"
    about: ClassVar[str] = "integers of `bits` bits with a scale for every 32 values, fixed size"
    settings: ClassVar[tuple[Setting, ...]] = SETTINGS
    block_size: int = TILE
    fuses: ClassVar[bool] = True
    kernels = KernelSet[FixedKernels](name)

    def __init__(
        self,
        bits: int = 8,
        rotate: bool = False,
        levels: Levels = "uniform",
        rounding: Rounding = "nearest",
    ) -> None:
        self.check_settings(bits=bits, rotate=rotate, levels=levels, rounding=rounding)
        if rotate and bits > ROTATION_BITS:
            raise CodecError(
                f"blockint: rotate gains only at {ROTATION_BITS} bits and fewer and the message "
                f"has {bits}; remove it, found True"
            )
        if levels in _SPACINGS and bits != SPACED_BITS:
            raise CodecError(
                f"blockint: levels {levels} are {_SPACINGS[levels][1]}, for {SPACED_BITS} bits and "
                f"not {bits}, found {levels!r}"
            )
        if levels in _SPACINGS and rounding == "random":
            raise CodecError(
                "blockint: rounding random needs levels that are evenly spaced and the message has "
                f"levels {levels}; remove one of them, found 'random'"
            )
        self.bits = bits
        self.rotate = rotate
        self.levels = levels
        self.rounding = rounding
        self.unbiased = rounding == "random"

    @cached_property
    def spec(self) -> str:
        rotate = ", rotate=True" if self.rotate else ""
        levels = f", levels={self.levels}" if self.levels != "uniform" else ""
        rounding = f", rounding={self.rounding}" if self.rounding != "nearest" else ""
        return f"blockint(bits={self.bits}{rotate}{levels}{rounding})"

    @classmethod
    def ladder(cls) -> tuple[BlockInt, ...]:
        return tuple(cls(bits) for bits in range(2, 9))

    @cached_property
    def _setting(self) -> int:
        levels, _ = _SPACINGS.get(self.levels, (0, 0))
        return self.bits + 16 * self.rotate + levels + 64 * (self.rounding == "random")

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        if dtype not in VALUE_DTYPES:  # called several times for each message
            check_dtype(self.spec, dtype)
        blocks, tiles = -(-numel // BLOCK), -(-numel // TILE)
        return -(-(blocks * (4 * self.bits + 1) + tiles) // PAYLOAD_ALIGN) * PAYLOAD_ALIGN

    def encode_kept(self, values: Tensor, residual: QuantizedResidual, out: Tensor) -> bool:
        encode = getattr(self.kernels.on(values.device), "encode_kept", None)
        if encode is None or not residual.in_blocks:
            return False
        nbytes = self.wire_nbytes(values.numel(), torch.float32)
        check_encode(self.spec, values, out, nbytes)
        assert residual.numel() == values.numel(), "a residual of another length"
        code, source, places = DTYPE_CODES[values.dtype], values.data_ptr(), residual.addresses()
        kept = (residual.bits, *places, torch.get_num_threads())
        encode(self._setting, code, source, values.numel(), out.data_ptr(), nbytes, *kept)
        return True

    def wire_nbytes_of(self, numels: Lengths, dtype: torch.dtype) -> Lengths:
        check_dtype(self.spec, dtype)
        lengths = np.ascontiguousarray(numels, dtype=np.int64)
        nbytes = np.empty_like(lengths)
        on_host("lengths").blockint_nbytes(lengths, self._setting, nbytes)
        return nbytes

    def fused(self, device: torch.device) -> CollectiveKernel | None:
        make = getattr(self.kernels.on(device), "fused", None)
        fused: CollectiveKernel | None = None if make is None else make(self._setting)
        return fused

    def each(self, device: torch.device) -> MultiTensorKernel | None:
        make = getattr(self.kernels.on(device), "each", None)
        each: MultiTensorKernel | None = None if make is None else make(self._setting)
        return each

    def planned(self, device: torch.device) -> PlannedKernel | None:
        make = getattr(self.kernels.on(device), "planned", None)
        planned: PlannedKernel | None = None if make is None else make(self._setting)
        return planned

    def element_bound(self, absmax: float, dtype: torch.dtype) -> float:
        """Return the largest error of an element whose aligned tile of 1024 values has this absmax.

        ``absmax`` is finite. With ``rotate`` this is the worst case over a group of 64 values, 45
        times the bound without rotation and far above real errors, so it is not offered as a bound.
        """
        check_dtype(self.spec, dtype)
        # half a quantization step, or a whole one for random rounding; the last digit covers
        # rounding in the scale, its inverse and products
        levels: int = 2 ** (self.bits - 1) - 1
        steps = 1.0001 if self.rounding == "random" else 0.5001
        share = _SHARES.get(self.levels, steps / levels)
        top = absmax * 17 / 16
        if self.rotate:
            # norm of H D times the errors of two blocks of 32, whose squared tops sum to at most
            # the group's
            return share * (math.sqrt(32 * ROTATION) * top + ROTATION * SMALLEST_TOP)
        return share * max(top, SMALLEST_TOP)
