"""radix: error-bounded, variable size; of all our codecs, the fewest bits at a given error.

The format and the derivation of its bound are at the top of ``kernels/formats/radix.h``.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import ClassVar, get_args

import numpy as np
import torch
from torch import Tensor

from hybridcomp.codecs._variable import VariableCodec
from hybridcomp.codecs.base import align
from hybridcomp.codecs.budget import LARGEST_SEGMENT, SEGMENT_STEP, SMALLEST_SEGMENT, Mode
from hybridcomp.codecs.checks import check_count, check_dtype
from hybridcomp.errors import CodecError
from hybridcomp.kernels import KernelSet, VariableKernels

BLOCK = SEGMENT_STEP
HEADER, TILE_HEADER, TAIL = 32, 8, 8


def _floor_float32(value: float) -> float:
    """Return the largest float32 that is not above ``value``."""
    with np.errstate(over="ignore"):
        rounded = np.float32(value)
    below = rounded if float(rounded) <= value else np.nextafter(rounded, np.float32(0))
    return float(below)


def _largest_tile(numel: int, dtype: torch.dtype) -> int:
    """Return the most bytes of a tile, as in kernels/cpu: raw blocks with the largest heads."""
    blocks = -(-numel // BLOCK)
    head = TILE_HEADER + 7 * -(-blocks // 8)
    return -(-(head + blocks * BLOCK * dtype.itemsize + 8) // 4) * 4


class Radix(VariableCodec):
    """Keep every finite element within ``error_bound`` times its segment's absmax.

    Segments are aligned ranges of ``segment`` values; absmax is taken over a segment's finite
    values. NaN and Inf are kept exactly, and the segment's other values keep the bound. The bound
    of a 16-bit message holds after decoding to its own dtype or to float32; decoding any message to
    another 16-bit dtype adds that dtype's rounding.

    Gaussian values take 3.0 bits each at a bound of 1e-1, 6.1 at 1e-2, and 3.3 more for every
    further factor of ten.

    Args:
        error_bound: with ``mode="rel"`` relative to the segment's absmax, below 1; with
            ``mode="abs"`` in units of the values. Rounded down to a float32.
        segment: values that share a step, a multiple of 16 from 64 to 4096.
        mode: "rel" or "abs".

    Raises:
        CodecError: an argument is out of range.
    """

    name: ClassVar[str] = "radix"
    about: ClassVar[str] = "fewest bits for an `error_bound`, variable size"
    lossless = False
    kernels = KernelSet[VariableKernels](name)

    def __init__(
        self, error_bound: float = 1e-2, segment: int = LARGEST_SEGMENT, mode: Mode = "rel"
    ) -> None:
        if mode not in get_args(Mode):
            raise CodecError(f"radix: mode must be one of {get_args(Mode)}, found {mode!r}")
        limit = 1.0 if mode == "rel" else math.inf
        number = isinstance(error_bound, (int, float)) and not isinstance(error_bound, bool)
        if not number or not 2.0**-126 <= error_bound < limit:
            raise CodecError(
                f"radix: error_bound must be a number from 2^-126 to below {limit}, "
                f"found {error_bound!r}"
            )
        if (
            isinstance(segment, bool)
            or not isinstance(segment, int)
            or segment % BLOCK
            or not SMALLEST_SEGMENT <= segment <= LARGEST_SEGMENT
        ):
            raise CodecError(
                f"radix: segment must be a multiple of {BLOCK} from {SMALLEST_SEGMENT} to "
                f"{LARGEST_SEGMENT}, found {segment!r}"
            )
        self.error_bound = _floor_float32(error_bound)
        self.segment = segment
        self.mode: Mode = mode

    @cached_property
    def spec(self) -> str:
        # ``str`` writes the shortest decimal that identifies the float32
        bound = str(np.float32(self.error_bound))
        return f"radix(error_bound={bound}, segment={self.segment}, mode={self.mode})"

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        check_dtype(self.spec, dtype)
        check_count(self.spec, numel)
        if numel == 0:
            return 0
        tiles = -(-numel // self.segment)
        last = numel - (tiles - 1) * self.segment
        most = (tiles - 1) * _largest_tile(self.segment, dtype) + _largest_tile(last, dtype)
        return align(HEADER + 4 * tiles + most + TAIL)

    @property
    def _settings(self) -> tuple[float, ...]:
        return self.segment, self.mode == "rel", self.error_bound

    @property
    def _least_nbytes(self) -> int:
        return align(HEADER + TAIL)

    def element_bound(self, absmax: float, dtype: torch.dtype) -> float:
        """Return the largest error of an element whose segment has this finite absmax.

        It holds after decoding to float32 or, for a 16-bit message, to the message's dtype.
        """
        check_dtype(self.spec, dtype)
        return self.error_bound * (absmax if self.mode == "rel" else 1.0)

    def beyond(self, values: Tensor, decoded: Tensor) -> Tensor:
        """Count the ``values`` that differ from ``decoded`` by more than their segment's bound."""
        error = (decoded.double() - values.double()).abs()
        if self.mode == "abs":
            return (error > self.error_bound).sum()
        pad = -values.numel() % self.segment
        rows = torch.nn.functional.pad(values.double().abs(), (0, pad)).view(-1, self.segment)
        limits = rows.amax(1).repeat_interleave(self.segment)[: values.numel()] * self.error_bound
        return (error > limits).sum()
