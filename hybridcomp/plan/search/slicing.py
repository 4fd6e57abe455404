"""Token slices of a layout: lengths whose passes take equally long.

A token costs what its matrix products cost, and more for every token before it that it looks at.
Where slices take equally long none of them holds the others up; which number of them is best the
search finds out. When a job starts, ``--slices auto`` chooses anew from times that it measures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from hybridcomp.plan.cost.job import Job
from hybridcomp.plan.layout import Layout
from hybridcomp.plan.models.model import flops_of

#: numbers of slices that are tried, and the tokens that a slice has at least
COUNTS, LEAST = (2, 4, 8, 16, 32, 64), 16


def sliced(job: Job, layout: Layout) -> Iterator[tuple[int, ...]]:
    """The lengths of the slices of a sequence, for every number of slices that is tried."""
    for count in COUNTS:
        if count * LEAST <= job.batch.length:
            yield slice_lengths(job, layout, count)


def slice_lengths(job: Job, layout: Layout, count: int) -> tuple[int, ...]:
    """``count`` slices of equal FLOPs.

    Attention is counted as if nothing were masked, so that a sequence of L tokens costs
    ``a L + b L^2``; of this a token at place p takes ``a + b p``.
    """
    length = job.batch.length
    shape = replace(job.shape(layout), slices=1)
    one, two = (flops_of(job.model.layers(replace(shape, length=n))) for n in (length, 2 * length))
    square = max(0.0, (two - 2 * one) / (2 * length**2))
    linear = one / length - square * length
    whole = linear * length + square * length**2 / 2
    stops = [0]
    for number in range(1, count + 1):
        share = whole * number / count
        root = math.sqrt(linear**2 + 2 * square * share)
        place = round(2 * share / (linear + root))
        stops.append(min(max(place, stops[-1] + 1), length - (count - number)))
    return tuple(stop - start for start, stop in pairwise(stops))
