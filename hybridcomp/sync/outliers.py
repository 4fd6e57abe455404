"""Detect islands whose weight changes are outliers; they are treated as if they had sent NaN."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor
from torch.distributed import ProcessGroup

from hybridcomp.job import small_messages

T = TypeVar("T")
NOT_FINITE = "sent NaN or Inf"


def unfit(
    islands: Sequence[T],
    finite: Sequence[bool],
    squares: Callable[[], Tensor],
    above: float | None,
    inside: ProcessGroup | None,
) -> dict[T, str]:
    """Return the islands whose messages do not count, with what they did.

    With ``above`` a collective of the island ``inside``.

    Args:
        islands: those that sent a message; ``finite``: by island whether it is without NaN and Inf.
            Both the same on all ranks.
        squares: returns, as fp64, by island the sum of squares of what it has sent to this rank.
        above: of the block; None: nobody is far off.
    """
    bad = {one: NOT_FINITE for one, well in zip(islands, finite, strict=True) if not well}
    if islands and above is not None:
        far = far_off(squares(), finite, above, inside)
        told = f"moved more than {above:g} times as far as the median of all (outlier)"
        bad.update({one: told for one, is_far in zip(islands, far, strict=True) if is_far})
    return bad


def far_off(
    squares: Tensor, finite: Sequence[bool], above: float, inside: ProcessGroup | None
) -> list[bool]:
    """Return by island whether its norm is more than ``above`` times the median of all finite ones.

    A collective of the island ``inside``, whose ranks add up in one order: all islands find the
    same.

    Args:
        squares: fp64, by island the sum of squares of what it has sent to this rank.
        finite: by island whether it sent no NaN or Inf; the same on all ranks.
        above: of the block.
    """
    parts = small_messages.gather(squares, inside)
    total = parts[0].clone()
    for part in parts[1:]:
        total.add_(part)
    norms = total.sqrt().tolist()
    known = [norm for norm, well in zip(norms, finite, strict=True) if well]
    if len(known) < 3:  # of two islands either may be the outlier
        return [False] * len(norms)
    most = above * statistics.median(known)
    return [well and norm > most for norm, well in zip(norms, finite, strict=True)]
