"""Choose the layers to recompute in backward, so that a chain fits into memory in the least time.

A chain is cut into segments. A segment either keeps everything that backward needs, or keeps only
the input of its first layer and runs forward once more when backward reaches it (Chen et al. 2016,
with segments of any length; Megatron's "uniform" and "block" recomputation are special cases). The
dynamic program goes along the chain and keeps the Pareto frontier of (bytes kept, extra seconds),
so it finds the best of all cuts into segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridcomp.tools.plan.algorithms.frontier import Linked, Point, frontier, link


@dataclass(frozen=True)
class Stored:
    """One layer of the chain.

    forward_seconds: of its forward pass. nbytes: that its backward pass needs. input_nbytes: of its
    input alone. work_nbytes: workspace that is allocated during its backward pass.
    """

    forward_seconds: float
    nbytes: float
    input_nbytes: float
    work_nbytes: float = 0.0


def cheapest_recomputation(
    layers: Sequence[Stored], nbytes: float
) -> tuple[tuple[int, int], ...] | None:
    """Find the segments ``[start, stop)`` whose recomputation takes the fewest extra seconds.

    ``nbytes``: limit of ``cost.memory.worst_moment``. Returns None where none fits.
    """
    # choices: 2 * stop + recomputed, for every segment in order; a kept segment has one layer
    states: list[list[Point]] = [[Point(0.0, 0.0, None)]]
    for stop in range(1, len(layers) + 1):
        points: list[Point] = []
        recomputed = extra = 0.0
        for start in reversed(range(stop)):
            first = layers[start]
            # earlier layers' activations stay allocated during the backward of later layers
            recomputed = first.nbytes + max(first.work_nbytes, recomputed)
            extra += first.forward_seconds
            for point in states[start]:
                if point.first + recomputed <= nbytes:
                    kept = point.first + layers[start].input_nbytes
                    choice = Linked(2 * stop + 1, point.choices)
                    points.append(Point(kept, point.second + extra, choice))
        layer = layers[stop - 1]
        points += [
            Point(point.first + layer.nbytes, point.second, Linked(2 * stop, point.choices))
            for point in states[stop - 1]
            if point.first + layer.nbytes + layer.work_nbytes <= nbytes
        ]
        states.append(frontier(points))
    if not states[-1]:
        return None
    best = min(states[-1], key=lambda point: (point.second, point.first))
    segments, start = [], 0
    for marked in link(best.choices):
        stop = marked // 2
        if marked % 2:
            segments.append((start, stop))
        start = stop
    return tuple(segments)
