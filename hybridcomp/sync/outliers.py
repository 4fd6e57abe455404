"""Find islands whose moves are far off those of the others: they count as if they had sent NaN."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from hybridcomp.job import small_messages

NOT_FINITE = "sent NaN or Inf"


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
    if len(known) < 3:  # of two nobody knows which is far off
        return [False] * len(norms)
    most = above * statistics.median(known)
    return [well and norm > most for norm, well in zip(norms, finite, strict=True)]


def why(above: float | None) -> str:
    """Say what an island did that was far off."""
    return f"moved more than {above:g} times as far as the median of all (outlier)"
