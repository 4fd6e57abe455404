"""bounded: an error bound for the result of a collective, split over its quantizations.

**The promise.** A message is cut where the collective cuts it for its ranks and, in gradient
buckets, at the borders of parameters; each range is divided into segments of ``segment`` values,
the last one shorter. M_r is the largest finite magnitude of a segment on rank r, A the sum of M_r
over the ranks (of a message that is only moved: M of its sender). For every element that is finite
on all ranks

    rel    |result - exact sum| <= error_bound * A
    abs    |result - exact sum| <= error_bound + (A + error_bound) * ((1 + g)(1 + u) - 1)

``result`` is the return value of the collective, before its caller divides; u is half a unit of the
result's dtype (2^-8 bf16, 2^-11 fp16, 0 fp32, whose rounding the codecs count as their own error),
g = (W + 2) 2^-24 / (1 - (W + 2) 2^-24) bounds the error of fp32 arithmetic in a sum of W ranks. In
absolute mode u and g are added to the bound: they depend on the values, and native has them too.
Conditions:

* the sum fits: A * (1 + error_bound) is below the largest number of the result's dtype;
* where a 16-bit sum is subnormal in its dtype, rounding it costs half of the smallest spacing
  (2^-25 fp16, 2^-134 bf16) on top, as it does natively;
* a sum that no quantization can keep within the bound is sent lossless, and then has native's
  accuracy: a 16-bit sum that every rank gets and whose rounding u is above the bound (in two levels
  it is rounded inside the node too), and any sum whose bound is below g;
* with error feedback x_r is the values to send plus their residual. The owner's residual counts as
  the values of one more rank;
* fixed-size codecs have absolute floors: with them M_r counts as at least ``budget.FLOOR``.
  radix and lossless codecs have none; ``auto`` takes fixed-size ones only for fp16, whose values
  lie above.

``codecs/budget.py`` splits the bound over the quantizations; ``codecs/cheapest.py`` finds a codec
for each part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.budget import (
    LARGEST_SEGMENT,
    ROUNDING,
    SEGMENT_STEP,
    SMALLEST_SEGMENT,
    Mode,
    best_bound,
    of_moved,
    shares,
)
from hybridcomp.codecs.capabilities import Shortfall
from hybridcomp.codecs.cheapest import LOSSLESS_BELOW, SMALL_NUMEL, cheapest, cheapest_for_fp16
from hybridcomp.codecs.registry import (
    ANY_BOUND,
    AUTO,
    KEEPS_EVERY_BOUND,
    LOSSLESS,
    SMALL,
    ladder_of,
    make_codec,
)
from hybridcomp.codecs.words import DTYPE_NAMES, used_for
from hybridcomp.errors import CodecError


class Bounded(Codec):
    """An error bound for results of collectives, and the codecs that keep it.

    Used directly as a codec, it encodes a message that is only moved.

    Args:
        error_bound: relative to the segment's absmax, below 1; absolute with ``mode="abs"``.
        mode: "rel" or "abs".
        segment: values of a segment, a multiple of 16 from 64 to 4096.
        family: "auto", "radix" or a codec with a ``ladder``, of which the cheapest setting that
            keeps the bound is taken. Messages for which none keeps it are lossless.
        fixed: a setting of a fixed-size codec to use; where it does not keep the bound, lossless.
        inner: number of fp32 additions by which every encoded value was computed.
        rounding: relative error that rounding the result afterwards adds.

    Raises:
        CodecError: an argument is out of range, or the family never keeps such a bound.
    """

    name: ClassVar[str] = "bounded"
    bounded: ClassVar[bool] = True
    lossless = False

    def __init__(
        self,
        error_bound: float,
        mode: Mode = "rel",
        segment: int = LARGEST_SEGMENT,
        family: str = AUTO,
        fixed: Codec | None = None,
        inner: int = 0,
        rounding: float = 0.0,
    ) -> None:
        if mode not in get_args(Mode):
            raise CodecError(f"error_bound_mode must be one of {get_args(Mode)}, found {mode!r}")
        limit = 1.0 if mode == "rel" else math.inf
        if not 2.0**-100 <= error_bound < limit:
            raise CodecError(
                f"error_bound must be from 2^-100 to below {limit:g}, found {error_bound!r}"
            )
        if segment % SEGMENT_STEP or not SMALLEST_SEGMENT <= segment <= LARGEST_SEGMENT:
            raise CodecError(
                f"segment must be a multiple of {SEGMENT_STEP} from {SMALLEST_SEGMENT} to "
                f"{LARGEST_SEGMENT}, found {segment!r}"
            )
        assert family in (AUTO, ANY_BOUND.name) or ladder_of(family)
        self.error_bound = float(error_bound)
        self.mode: Mode = mode
        self.segment = segment
        self.family = family
        self.fixed = fixed
        self.unbiased = fixed is not None and fixed.unbiased
        self.inner = inner
        self.rounding = rounding
        self.choices = (fixed,) if fixed else ladder_of(family)
        ladder = self.choices
        if ladder and mode == "abs":
            raise CodecError(
                f"error_bound_mode must be rel for {family}, whose error grows with the values; "
                f"{ANY_BOUND.name} keeps absolute bounds, found 'abs'"
            )
        if ladder and segment % ladder[0].block_size:
            raise CodecError(
                f"segment must be a multiple of {ladder[0].block_size} for {family}, which scales "
                f"that many values together, found {segment!r}"
            )
        self.fixed_size = bool(ladder)

        where = f" of sums of {inner + 1}" if inner else ""
        then = f", then rounded by {rounding:g}" if rounding else ""
        self._spec = (  # computed once, since it is a cache key
            f"{fixed.spec if fixed else family} within {self.error_bound!r} "
            f"({mode}, segments of {segment} values{where}{then})"
        )

    @property
    def spec(self) -> str:
        return self._spec

    def split_error_budget(
        self,
        count: int,
        world_size: int,
        *,
        result: torch.dtype = torch.float32,
        exact: int = 0,
    ) -> tuple[Codec, ...]:
        """See ``Codec.split_error_budget``; the codecs are cached."""
        return _hops(self, count, world_size, result, exact)

    def for_message(self, numel: int, dtype: torch.dtype, world_size: int) -> Codec:
        """Return the concrete codec for ``auto``: lossless, blockint or radix; see
        ``codecs/cheapest.py``.
        """
        return (
            self if self.family == ANY_BOUND.name else _resolved(self, dtype, numel < SMALL_NUMEL)
        )

    def within(self, error_bound: float) -> Bounded:
        """Return the same promise with another bound."""
        return Bounded(
            error_bound, self.mode, self.segment, self.family, self.fixed, self.inner, self.rounding
        )

    def for_presummed(self, ranks: int, result: torch.dtype = torch.float32) -> Bounded:
        """See ``Codec.for_presummed``."""
        return _summing(self, ranks - 1, ROUNDING[result])

    def cost_summary(self, *, summed: bool) -> str:
        """Describe the codecs for messages of each dtype, for the line at start-up."""
        kinds: dict[str, list[str]] = {}
        for dtype in ROUNDING:
            small = self.for_message(0, dtype, 2)
            found = self.for_message(1 << 30, dtype, 2)
            used = [used_for(found, summed, dtype)]
            if small != found:
                used.append(f"under {SMALL_NUMEL} values {used_for(small, summed, dtype)}")
            kinds.setdefault(", ".join(used), []).append(DTYPE_NAMES[dtype])
        listed = "; ".join(f"{' '.join(names)} {used}" for used, names in kinds.items())
        unit = " of the largest" if self.mode == "rel" else ""
        return f"error within {self.error_bound:g}{unit} in {self.segment} values: {listed}"

    def unreachable_bound(self, *, summed: bool) -> Shortfall | None:
        """See ``Capabilities.unreachable_bound``; ``auto`` and radix keep every bound."""
        if not self.choices:
            return None
        count = 2 if summed else 1
        least = best_bound(self.choices, count)
        if least <= self.error_bound:
            return None
        over = "the two quantizations of a sum" if summed else "one quantization"
        what = self.fixed.spec if self.fixed else f"{self.family} at its finest"
        finest = ladder_of(self.family)
        more = ""
        if self.fixed and best_bound(finest, count) <= self.error_bound:
            fit = next(c for c in finest if best_bound((c,), count) <= self.error_bound)
            more = f"leave its setting out to get {fit.spec}, or "
        todo = f"{what} guarantees {least:.3g} over {over}; {more}{KEEPS_EVERY_BOUND}"
        return Shortfall(self.error_bound, todo)

    def _moved(self, dtype: torch.dtype) -> Codec:
        return self.split_error_budget(1, 1, result=dtype)[0]

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return self._moved(dtype).wire_nbytes(numel, dtype)

    def encode(self, values: Tensor, out: Tensor) -> int:
        return self._moved(values.dtype).encode(values, out)

    def encode_into(self, values: Tensor, out: Tensor, size: Tensor) -> None:
        self._moved(values.dtype).encode_into(values, out, size)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        self._moved(out.dtype).decode(payload, out)

    def decode_add(self, payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
        self._moved(dtype).decode_add(payload, out, dtype)

    def element_bound(self, absmax: float, dtype: torch.dtype) -> float:
        """Return the bound of a message that is only moved; ``absmax`` is its segment's."""
        return self._moved(dtype).element_bound(absmax, dtype)


@lru_cache(maxsize=256)
def _summing(bound: Bounded, inner: int, rounding: float) -> Bounded:
    return Bounded(
        bound.error_bound, bound.mode, bound.segment, bound.family, bound.fixed, inner, rounding
    )


@lru_cache(maxsize=4096)
def _hops(
    bound: Bounded, count: int, world_size: int, result: torch.dtype, exact: int
) -> tuple[Codec, ...]:
    ladder = bound.choices
    moved = count == 1 and world_size == 1
    # radix checks values after rounding to the message's dtype; other codecs need the rounding
    # added
    rounding = 0.0 if moved and not ladder else max(ROUNDING[result], bound.rounding)
    sums = bound.inner + world_size + 2 if world_size > 1 else 0
    errors = shares(bound.error_bound, bound.mode, count, world_size - exact, sums, rounding)
    if moved and ladder:
        errors = (of_moved(errors[0], bound.error_bound, result),)
    found = tuple(
        cheapest(ladder, bound.family, bound.mode, bound.segment, error, result) for error in errors
    )
    # a lossless hop beside a lossy one would spend bits on accuracy that the other hop loses
    return (LOSSLESS,) * count if LOSSLESS in found else found


@lru_cache(maxsize=4096)
def _resolved(bound: Bounded, dtype: torch.dtype, small: bool) -> Codec:
    if bound.choices:  # a message of fixed size must keep a fixed size
        return bound if bound._moved(dtype).fixed_size else LOSSLESS
    if bound.mode == "rel" and bound.error_bound < LOSSLESS_BELOW[dtype]:
        return LOSSLESS
    if small and dtype == torch.float16 and bound.mode == "rel":
        fixed = cheapest_for_fp16(bound.error_bound, bound.segment)
        if fixed is not None:
            return Bounded(bound.error_bound, "rel", bound.segment, SMALL.name, fixed)
    return bound


def make_bounded(family: str, settings: Mapping[str, Any], promise: Mapping[str, Any]) -> Bounded:
    """Build a ``Bounded`` from the arguments ``promise`` and the codec settings that were written.

    Raises:
        CodecError: a setting is out of range.
    """
    fixed = make_codec(family, **settings) if settings else None
    return Bounded(**promise, family=family, fixed=fixed)
