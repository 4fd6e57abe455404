"""Choose the segments of a stage to recompute, for engines that can recompute any layer."""

from __future__ import annotations

from collections.abc import Sequence

from hybridcomp.tools.plan.algorithms.recompute import Stored, cheapest_recomputation
from hybridcomp.tools.plan.cost.memory import kept_nbytes, worst_moment
from hybridcomp.tools.plan.models.model import ModelLayer

#: number of memory limits of one pass to try, where several passes are in flight
LIMITS = 8


def need(
    layers: Sequence[ModelLayer], segments: Sequence[tuple[int, int]], others: float, width: int
) -> float:
    """Return the peak bytes of activations with ``others`` more micro-batches in flight."""
    one = worst_moment(layers, segments, width, grows=False)
    return others * kept_nbytes(layers, segments) + one.activations


def cheapest(
    stored: Sequence[Stored], layers: Sequence[ModelLayer], others: float, width: int, limit: float
) -> tuple[tuple[int, int], ...] | None:
    """Find the segments with the fewest extra seconds whose need is within ``limit``; or None.

    The dynamic program sees one pass. The other passes in flight keep less under a smaller limit,
    so several limits are tried, and the need of each result is computed with all passes. Single
    layers from the front, as in Megatron's "block" recomputation, are candidates as well.
    """
    tried = [tuple((n, n + 1) for n in range(count)) for count in range(len(layers) + 1)]
    for step in range(1, LIMITS + 1) if others else (LIMITS,):
        found = cheapest_recomputation(stored, limit * step / LIMITS)
        if found is not None:
            tried.append(found)
    seconds = [layer.forward_seconds for layer in stored]
    fitting = [
        (sum(sum(seconds[start:stop]) for start, stop in segments), segments)
        for segments in tried
        if need(layers, segments, others, width) <= limit
    ]
    return min(fitting)[1] if fitting else None
