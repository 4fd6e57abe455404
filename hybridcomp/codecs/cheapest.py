"""Choose the codec that keeps an error bound in the fewest bytes, for ``auto``."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.budget import FLOOR, ROUNDING, Mode, of_moved, shares, worst_ratio
from hybridcomp.codecs.registry import ANY_BOUND, AUTO, LOSSLESS, SMALL, ladder_of

#: error of one encoding below which expcode needs fewer bits than radix. Bits a value, measured on
#: 2^20 Gaussian values: fp32: expcode 27.2, radix 21 at 5e-7, raw blocks at 2.4e-7 and below;
#: bf16: expcode 11.2, radix 11.1 at 5e-4; fp16: expcode 14.2, radix 13.5 at 1e-4
LOSSLESS_BELOW: Mapping[torch.dtype, float] = {
    torch.float32: 3e-7,
    torch.bfloat16: 4.5e-4,
    torch.float16: 7e-5,
}
#: elements of a message below which the exchange of sizes costs more than radix saves over
#: blockint. Radix saves 1 bit a value, here 32 KiB; the exchange is one more small message, at
#: least 0.1 ms on gloo over loopback: costs break even at 2.6 Gbit/s. Not measured on a GPU, where
#: the host also waits for the sizes; ``scripts/benchmarks/bench_gpu.py`` prints a GPU's value
SMALL_NUMEL = 1 << 18


def cheapest(
    ladder: tuple[Codec, ...],
    family: str,
    mode: Mode,
    segment: int,
    error: float,
    dtype: torch.dtype,
) -> Codec:
    """Find the cheapest codec whose error in one encoding is at most ``error``.

    Args:
        ladder: codecs of a fixed-size ``family``, cheapest first; empty for other families.
        segment: values that share an error bound.
        dtype: dtype of the result.
    """
    if ladder:
        fitting = (c for c in ladder if worst_ratio(c, torch.float32, FLOOR) <= error)
        return next(fitting, LOSSLESS)
    least = LOSSLESS_BELOW[dtype] if family == AUTO and mode == "rel" else 2.0**-126
    if error < least:
        return LOSSLESS
    return ANY_BOUND(error, segment, mode)


def cheapest_for_fp16(error_bound: float, segment: int) -> Codec | None:
    """Find the blockint with the fewest bits that keeps a bound for all fp16 messages.

    ``error_bound`` is relative to the absmax of each segment of ``segment`` values. Returns None
    if no number of bits keeps it.
    """
    smallest = 2.0**-24
    two_hops = shares(error_bound, "rel", 2, 64, 66, ROUNDING[torch.float16])[0]
    error = of_moved(two_hops, error_bound, torch.float16)
    for codec in ladder_of(SMALL.name):
        fits = segment % codec.block_size == 0
        if fits and worst_ratio(codec, torch.float16, smallest) <= error:
            return codec
    return None
