"""Divide a device's memory between optimizer states and gathered parameters (ZeRO 3).

A parameter that is kept between its uses saves a gather; a sub-group of the optimizer that is kept
saves its copies and is stepped by the device. Which of the two is worth more depends on the speeds
of links, bus and hosts, native or encoded, so the search prices every division of the memory.
States that a host has no room for go to its drive, encoded if that is faster.
"""

from __future__ import annotations

from collections.abc import Iterator

from hybridcomp.tools.plan.choices import Choices
from hybridcomp.tools.plan.cost.copies import STATES
from hybridcomp.tools.plan.cost.job import PlannedJob
from hybridcomp.tools.plan.cost.work import Work, divided, gathered, model_pass
from hybridcomp.tools.plan.layout import Layout
from hybridcomp.tools.plan.search.evaluate import Evaluator
from hybridcomp.tools.plan.search.space import searches_gathers

#: shares of the optimizer's sub-groups that are tried
SHARES = 16


def divisions(job: PlannedJob, evaluator: Evaluator, work: Work) -> Iterator[Work]:
    """Yield a placed layout, and its forms with every share of the optimizer on the host.

    The memory left over holds gathered parameters, with and without room for buffers of codecs.
    A layout whose gathers are not searched is the only one yielded.
    """
    layout, (stage, *_) = work.layout, work.stages
    model, seen = model_pass(job, layout, stage), set[Layout]()
    searched = searches_gathers(job, layout)
    if searched and not layout.knobs and _drive(job, work, layout.ratio, False) == 0:
        yield work
    for ratio in _ratios(job, layout) if searched else (layout.ratio,):
        drive = _drive(job, work, ratio, searched)
        if drive is None:
            continue
        size = model.sub_group(layout.size("replicas")) if ratio < 1 or drive else 0
        given = layout.replace(ratio=ratio, sub_group=size, drive=drive)
        one = work if given == layout else divided(job, work, given)
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
                yield divided(job, work, found)


def _drive(job: PlannedJob, work: Work, ratio: float, searched: bool) -> float | None:
    """Return the share of the optimizer's states that the hosts have no room for.

    None: the hosts have no drive, or the layout cannot use it.
    """
    layout, stage, cluster = work.layout, work.stages[0], job.cluster
    own = sum(stage.trained) / layout.size("replicas")
    local = min(cluster.ranks_per_node, layout.ranks)
    room = job.limits.memory_share * cluster.host_nbytes / local / STATES
    if not layout.offload or not cluster.host_nbytes or ratio * own <= room:
        return 0.0
    if not (searched and ratio == 1 and cluster.drives):
        return None
    return model_pass(job, layout, stage).on_drive(layout.size("replicas"), room)


def _ratios(job: PlannedJob, layout: Layout) -> tuple[float, ...]:
    if not layout.offload or "ratio" in job.limits.fixed:
        return (layout.ratio,)
    return tuple(part / SHARES for part in range(SHARES, -1, -1))
