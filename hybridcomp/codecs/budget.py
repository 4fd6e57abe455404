"""Split the error bound of a collective over its quantizations.

The promise, and the meaning of A, M, W, u and g, are at the top of ``codecs/bounded.py``.

Let every encoding keep e times the absmax of its segment. The ranks' decoded values are off by e A
in sum and reach (1 + e) A; summing them in fp32 adds g times that. So the sum T has M_T <=
(1 + g)(1 + e) A and is off by (1 + g)(1 + e) A - A. Encoding T adds e M_T, and rounding the
decoded values to 16 bits u (1 + e) M_T, so that with n quantizations

    |result - exact| <= ((1 + e)^n (1 + g)(1 + u) - 1) A
    e = ((1 + error_bound) / ((1 + g)(1 + u)))^(1/n) - 1

keeps the promise. Both hops get equal shares, because a hop costs log2(1 / e) bits a value and both
carry equally many values. With an absolute bound E errors add up: k encoded summands keep E / k in
one hop, and E / 2k and E / 2 in two.

A fixed-size codec bounds its error in fp32; a message that is only moved is then rounded to its own
dtype. Rounding adds an error of u relative to the value, but fp16 values below 2^-14 lie on a grid
of 2^-24, and half a step of the grid may be as much as the codec's error. It is never more: the
sent value is a grid point, so the grid point nearest to the decoded value is no further from it
than the sent value. So the two errors add up to at most twice the codec's, and the codec of a moved
fp16 message gets half of the bound (with all of it, fuzzing showed errors of up to 1.56 times the
bounds 0.1, 0.02 and 0.006 in segments with an absmax below 1e-5). Subnormals of bf16 and fp32 lie
below FLOOR.

Both hops have the same segments, or the first inequality would not hold; so a message with owners
is also cut where the owner changes. Source of g: Higham, Accuracy and Stability
of Numerical Algorithms, section 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch

from hybridcomp.codecs.base import Codec

#: relative to the largest magnitude of a segment, or absolute
Mode = Literal["rel", "abs"]
#: a segment is a multiple of the first number, between the second and the third
SEGMENT_STEP, SMALLEST_SEGMENT, LARGEST_SEGMENT = 16, 64, 4096

#: smaller magnitudes count as this with a fixed-size codec
FLOOR = 2.0**-72
#: relative rounding error of a result's dtype: half a unit
ROUNDING: Mapping[torch.dtype, float] = {
    torch.float32: 0.0,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
}


def shares(
    bound: float, mode: Mode, count: int, summands: int, sums: int, rounding: float
) -> tuple[float, ...]:
    """Return the error that each quantization may add (see the top of this module); 0.0: none.

    ``summands``: encoded values of a sum; ``sums``: fp32 operations that may round.
    """
    if mode == "abs":
        k = max(1, summands)
        return (bound / k,) if count == 1 else (bound / (2 * k), bound / 2)
    unit = sums * 2.0**-24
    given_away = math.log1p(unit / (1 - unit)) + math.log1p(rounding)
    share = math.expm1((math.log1p(bound) - given_away) / count)
    return (max(0.0, share * (1 - 2.0**-40)),) * count  # compensates rounding in the logarithms


def of_moved(share: float, bound: float, dtype: torch.dtype) -> float:
    """Return the error that a fixed-size codec may add to a ``dtype`` message that is only moved.

    ``share``: the error that ``bound`` leaves for the codec besides relative rounding to ``dtype``.
    """
    return min(share, bound / 2) if dtype == torch.float16 else share


def worst_ratio(codec: Codec, dtype: torch.dtype, smallest: float) -> float:
    """Return the largest ratio of an element's error to its segment's absmax (>= ``smallest``).

    Bounds of elements are constant below some absmax and grow linearly above it, so the ends of the
    range are the worst cases.
    """
    ends = (smallest, 1.0, torch.finfo(dtype).max)
    return max(codec.element_bound(absmax, dtype) / absmax for absmax in ends)


def best_bound(ladder: tuple[Codec, ...], count: int) -> float:
    """Return the smallest relative bound that ``count`` quantizations keep in fp32 on 8 ranks."""
    ratio = min(worst_ratio(codec, torch.float32, FLOOR) for codec in ladder)
    return (1 + ratio) ** count * (1 + 11 * 2.0**-24) - 1
