"""Slice sequences into token slices whose passes take equally long.

A token costs the FLOPs of its matrix products, and more for every token before it that it attends
to. Slices of equal time do not wait for each other; the search finds the best number of them. When
a job starts, ``--slices auto`` chooses again from measured times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from hybridcomp.tools.plan.cost.job import PlannedJob
from hybridcomp.tools.plan.layout import Layout
from hybridcomp.tools.plan.models.model import flops_of

#: numbers of slices to try, and the least tokens of a slice
COUNTS, LEAST = (2, 4, 8, 16, 32, 64), 16


def sliced(job: PlannedJob, layout: Layout) -> Iterator[tuple[int, ...]]:
    """Yield the lengths of the slices of a sequence, for every number of slices to try."""
    for count in COUNTS:
        if count * LEAST <= job.batch.length:
            yield slice_lengths(job, layout, count)


def slice_lengths(job: PlannedJob, layout: Layout, count: int) -> tuple[int, ...]:
    """Return the lengths of ``count`` slices of equal FLOPs.

    FLOPs of a sequence of L tokens are ``a L + b L^2``, attention counted without a mask; a slice
    is cut as if the token at place p cost ``a + b p``.
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
