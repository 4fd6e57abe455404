"""What an error bound promises, computed in float64 from the values alone.

Knows where a collective cuts a message, as that is documented, and nothing of how a bound is split,
which codec is used or what was sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.float64]
#: half of the smallest spacing: what rounding a subnormal sum to its own dtype costs
HALF_SPACING = {torch.float32: 0.0, torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25}


@dataclass(frozen=True)
class Promise:
    """A bound as the user wrote it, and the smallest magnitude that counts."""

    bound: float
    mode: str = "rel"
    segment: int = 4096
    floor: float = 0.0


def double(tensor: Tensor) -> Array:
    """As float64."""
    found: Array = tensor.detach().double().numpy()
    return found


def segments(numel: int, edges: Sequence[int], segment: int) -> list[tuple[int, int]]:
    """``[0, numel)`` cut at ``edges`` and then every ``segment`` elements."""
    borders = sorted({0, numel, *(edge for edge in edges if 0 < edge < numel)})
    return [
        (low, min(low + segment, high))
        for start, high in pairwise(borders)
        for low in range(start, high, segment)
    ]


def check(
    result: Tensor,
    values: Sequence[Tensor],
    edges: Sequence[int],
    promise: Promise,
    *,
    start: int = 0,
    blocks_may_vanish: bool = False,
) -> int:
    """Assert that ``result`` is the sum of ``values`` (moved, if only one) within ``promise``.

    ``start``: where ``result`` begins in the message, of which it may be a part.
    ``blocks_may_vanish``: a NaN or Inf may take the finite values of its segment with it.
    Returns how many elements were held against their bound.
    """
    given = np.stack([double(v) for v in values])
    found, dtype, stop = double(result), result.dtype, start + result.numel()
    checked = 0
    for low, high in segments(given.shape[1], edges, promise.segment):
        first, last = max(low, start), min(high, stop)
        if first < last:
            allowed = limit(given[:, low:high], dtype, promise)
            part = found[first - start : last - start]
            spoiled = blocks_may_vanish and not np.isfinite(given[:, low:high]).all()
            checked += _hold(part, given[:, first:last], allowed, spoiled)
    return checked


def limit(given: Array, dtype: torch.dtype, promise: Promise) -> float:
    """What an element of this segment of all ranks may be off by; inf where sums may not fit."""
    ranks = given.shape[0]
    sane = np.isfinite(given)
    largest = np.where(sane, np.abs(given), 0.0).max(1)
    total = float(np.maximum(largest, promise.floor).sum())
    allowed = promise.bound * total
    if promise.mode == "abs":
        # what fp32 sums and the result's dtype round, with or without compression
        own = 0.0 if ranks == 1 else float(torch.finfo(dtype).eps) / 2 + (ranks + 2) * 2.0**-23
        allowed = promise.bound + (total + promise.bound) * own
    if total + allowed >= torch.finfo(dtype).max:
        return float("inf")
    return allowed + (HALF_SPACING[dtype] if ranks > 1 else 0.0)


def _hold(found: Array, given: Array, allowed: float, spoiled: bool) -> int:
    """Hold every element of one segment against ``allowed``; how many they were."""
    sane = np.isfinite(given)
    finite = sane.all(0)
    assert not np.isfinite(found[~finite]).any(), "a NaN or Inf went unseen"
    if allowed == float("inf"):
        return 0
    error = np.abs(found - np.where(finite, np.where(sane, given, 0.0).sum(0), np.nan))
    kept = error <= allowed * (1 + 1e-12)
    if spoiled:
        kept |= ~np.isfinite(found)
    worst = int(np.argmax(np.where(finite & ~kept, error, -1.0)))
    assert kept[finite].all(), (
        f"element {worst}: error {error[worst]:g}, allowed {allowed:g}, values {given[:, worst]}"
    )
    return int(finite.sum())
