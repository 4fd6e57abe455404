"""Answer a search where nothing is feasible: the reason, and the needs of the nearest plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hybridcomp.tools.plan.cost.job import PlannedJob
from hybridcomp.tools.plan.layout import Layout
from hybridcomp.tools.plan.request import Found, Nearest
from hybridcomp.tools.plan.search.placing import Placer
from hybridcomp.tools.plan.search.space import world

#: reason of a layout that engine and model allow, and that has no plan
NO_ROOM = "the memory of a rank is too small"
NO_HOST_ROOM = "the memory of a host is too small, and no drive takes the rest"


def nothing(job: PlannedJob, placer: Placer, every: list[Layout], found: Found) -> Found:
    """Return ``found``, which has no plans, with a reason in a sentence and the nearest plan."""
    if not every or not {NO_ROOM, NO_HOST_ROOM} & set(found.refused):  # it is not memory
        reasons = Counter(found.refused).most_common(1)
        decided = ", ".join(f"{name}={value}" for name, value in job.limits.fixed.items())
        why = reasons[0][0] if reasons else f"none has {decided}, as was decided"
        return replace(found, reason=f"no layout of {world(job)} ranks is possible: {why}")
    needs = [(placer.least_nbytes(layout), index) for index, layout in enumerate(every)]
    needed, index = min(needs)
    nearest = Nearest(every[index], "memory", needed, job.capacity)
    if needed <= job.capacity and NO_HOST_ROOM in found.refused:
        reason = f"no plan fits: {NO_HOST_ROOM}: measure or describe a drive, or use more nodes"
        return replace(found, reason=reason)
    reason = (
        f"no plan fits: the leanest of {len(every)} layouts ({every[index]}) needs "
        f"{needed / 1e9:.3g} GB on a rank, and {job.capacity / 1e9:.3g} GB may be used"
    )
    return replace(found, reason=reason, nearest=nearest)
