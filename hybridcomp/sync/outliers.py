"""Detect islands whose weight changes are outliers; they are treated like islands that sent NaN."""

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
    """Return the islands whose messages do not count, with the reasons.

    With ``above``, this is a collective of ``inside``, the ranks of this island.

    Args:
        islands: islands that sent a message; ``finite``: per island whether it has no NaN or Inf.
            Both are the same on all ranks.
        squares: returns for each island, in fp64, the sum of squares of the message that this rank
            received from it.
        above: the block's limit; None: there are no outliers.
    """
    bad = {one: NOT_FINITE for one, well in zip(islands, finite, strict=True) if not well}
    if islands and above is not None:
        far = far_off(squares(), finite, above, inside)
        text = f"moved more than {above:g} times as far as the median of all (outlier)"
        bad.update({one: text for one, is_far in zip(islands, far, strict=True) if is_far})
    return bad


def far_off(
    squares: Tensor, finite: Sequence[bool], above: float, inside: ProcessGroup | None
) -> list[bool]:
    """Return for each island whether its norm exceeds ``above`` times the median finite norm.

    A collective of ``inside``, the ranks of this island, which add up squares in a fixed order, so
    that all islands get the same result. ``squares``: what the argument of ``unfit`` returns.
    """
    parts = small_messages.gather(squares, inside)
    total = parts[0].clone()
    for part in parts[1:]:
        total.add_(part)
    norms = total.sqrt().tolist()
    known = [norm for norm, well in zip(norms, finite, strict=True) if well]
    if len(known) < 3:  # with two islands either could be the outlier
        return [False] * len(norms)
    most = above * statistics.median(known)
    return [well and norm > most for norm, well in zip(norms, finite, strict=True)]
