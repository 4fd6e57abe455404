"""Divide a device's memory between optimizer states and gathered parameters (ZeRO 3).

A parameter that is kept between its uses saves a gather, a sub-group of the optimizer that is kept
saves its copies and is stepped by the device. Which is worth more depends on the speeds of links,
bus and hosts, native or encoded: the search has every division, and prices them all.
"""

from __future__ import annotations

from collections.abc import Iterator

from hybridcomp.tools.plan.choices import Choices
from hybridcomp.tools.plan.cost.job import PlannedJob
from hybridcomp.tools.plan.cost.work import Work, gathered, model_pass, work_of
from hybridcomp.tools.plan.layout import Layout
from hybridcomp.tools.plan.search.evaluate import Evaluator
from hybridcomp.tools.plan.search.space import searches_gathers

#: shares of the optimizer's sub-groups that are tried
SHARES = 16


def divisions(job: PlannedJob, evaluator: Evaluator, work: Work) -> Iterator[Work]:
    """Yield a placed layout, and it with every share of its optimizer on the host that fits.

    What memory is left holds gathered parameters, with and without room for buffers of codecs.
    Layouts whose gathers are not searched come back alone.
    """
    layout, (stage, *_) = work.layout, work.stages
    model, seen = model_pass(job, layout, stage), set[Layout]()
    searched = searches_gathers(job, layout)
    if searched and not layout.knobs:
        yield work
    for ratio in _ratios(job, layout) if searched else (layout.ratio,):
        size = model.sub_group(layout.size("replicas")) if ratio < 1 else 0
        given = layout.replace(ratio=ratio, sub_group=size)
        one = work if given == layout else work_of(job, given)
        if not searched:
            yield one
            continue
        least = gathered(job, given, stage).peak
        free = job.capacity - evaluator.need(one, Choices())
        for buffers in (0.0, evaluator.largest(one)):
            knobs = model.chosen((free - buffers) / job.dtype.itemsize + least)
            found = given.replace(knobs=knobs or ())
            if knobs is not None and found not in seen:
                seen.add(found)
                yield work_of(job, found)


def _ratios(job: PlannedJob, layout: Layout) -> tuple[float, ...]:
    if not layout.offload or "ratio" in job.limits.fixed:
        return (layout.ratio,)
    return tuple(part / SHARES for part in range(SHARES, -1, -1))
