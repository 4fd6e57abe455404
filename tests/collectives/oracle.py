"""Error bound oracle, computed in float64 from the values alone.

It knows where a collective splits a message, as documented, but not how a bound is split, which
codec is used or what is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.float64]
#: error of rounding a sum to its dtype: half a unit, relative, and for subnormals half of the
#: smallest spacing
HALF_UNIT = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
HALF_SPACING = {torch.float32: 0.0, torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25}


@dataclass(frozen=True)
class Promise:
    """A bound as the user wrote it, and the smallest magnitude that counts."""

    bound: float
    mode: str = "rel"
    segment: int = 4096
    floor: float = 0.0


def double(tensor: Tensor) -> Array:
    """Convert to float64."""
    found: Array = tensor.detach().double().numpy()
    return found


def segments(numel: int, edges: Sequence[int], segment: int) -> npt.NDArray[np.int64]:
    """Return the starts of segments in ``[0, numel)``: at ``edges`` and every ``segment`` after."""
    borders = sorted({0, numel, *(edge for edge in edges if 0 < edge < numel)})
    pairs = zip(borders, borders[1:], strict=False)
    return np.concatenate([np.arange(low, high, segment) for low, high in pairs])


def check(
    result: Tensor,
    values: Sequence[Tensor],
    edges: Sequence[int],
    promise: Promise,
    *,
    start: int = 0,
    blocks_may_vanish: bool = False,
) -> None:
    """Assert that ``result`` is the sum of ``values`` (moved, if only one) within ``promise``.

    ``start``: offset of ``result`` in the message, if it is a part. ``blocks_may_vanish``: a NaN or
    Inf may spoil the finite values of its segment.
    """
    given = np.stack([double(v) for v in values])
    ranks, numel = given.shape
    if not result.numel():
        return
    dtype, part = result.dtype, slice(start, start + result.numel())
    found = double(result)
    sane: npt.NDArray[np.bool_] = np.isfinite(given)
    begins = segments(numel, edges, promise.segment)
    lengths = np.diff([*begins, numel])
    largest = np.maximum.reduceat(np.where(sane, np.abs(given), 0.0), begins, axis=1)
    allowed = limit(np.maximum(largest, promise.floor).sum(0), ranks, dtype, promise)
    whole = np.logical_and.reduceat(sane.all(0), begins)
    allowed, whole = (np.repeat(row, lengths)[part] for row in (allowed, whole))
    finite = np.asarray(sane.all(0))[part]
    assert not np.isfinite(found[~finite]).any(), "a NaN or Inf went unseen"
    error = np.abs(found - np.where(sane, given, 0.0).sum(0)[part])
    # nothing is promised where a sum may overflow
    kept = ~finite | (error <= allowed * (1 + 1e-12)) | np.isinf(allowed)
    if blocks_may_vanish:
        kept |= ~whole & ~np.isfinite(found)
    assert kept.all(), _worst(kept, error, allowed, given[:, part])


def limit(total: Array, ranks: int, dtype: torch.dtype, promise: Promise) -> Array:
    """Return the elements' error limit; ``total``: the sum of M_r; inf where sums may overflow."""
    allowed = promise.bound * total
    if promise.mode == "abs":
        # rounding of fp32 sums and of the result's dtype, with or without compression
        sums = (ranks + 2) * 2.0**-24 / (1 - (ranks + 2) * 2.0**-24) if ranks > 1 else 0.0
        own = HALF_UNIT[dtype] if ranks > 1 else 0.0
        allowed = promise.bound + (total + promise.bound) * ((1 + sums) * (1 + own) - 1)
    fits = total + allowed < torch.finfo(dtype).max
    return np.where(fits, allowed + (HALF_SPACING[dtype] if ranks > 1 else 0.0), np.inf)


def _worst(kept: npt.NDArray[np.bool_], error: Array, allowed: Array, given: Array) -> str:
    at = int(np.argmin(kept))
    return (
        f"{int((~kept).sum())} of {kept.size} elements; element {at}: error {error[at]:g}, "
        f"allowed {allowed[at]:g}, values {given[:, at]}"
    )
