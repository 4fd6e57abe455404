"""``--search mcmc``: layouts, codecs and recomputation by layer, drawn by a Metropolis walk.

For spaces that are too large to enumerate: which single layers are recomputed, and every codec of
every direction at once, beside the layout. After FlexFlow (Jia et al. 2019); the timeline of a
proposal is simulated from the first task on that differs from the one before.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from hybridcomp.plan.algorithms.anneal import anneal
from hybridcomp.plan.algorithms.timeline import Timeline, simulate
from hybridcomp.plan.choices import KEYS, Choice, Choices, Key
from hybridcomp.plan.cost.job import Job
from hybridcomp.plan.cost.predict import plan_of
from hybridcomp.plan.cost.step import sample, seconds_of, tasks_of
from hybridcomp.plan.cost.times import stage_times
from hybridcomp.plan.cost.work import Work, work_of
from hybridcomp.plan.engines import can_recompute, recomputations
from hybridcomp.plan.layout import Layout
from hybridcomp.plan.request import Found
from hybridcomp.plan.search.budget import Budget
from hybridcomp.plan.search.evaluate import Evaluator, options_of
from hybridcomp.plan.search.nearest import NO_ROOM, nothing
from hybridcomp.plan.search.placing import Placer
from hybridcomp.plan.search.space import layouts


@dataclass(eq=False)
class Walk:
    """The space of a walk: what each number of a point stands for, and what a point costs.

    A point: which layout, then the option of every key, then for every block whether it runs
    forward twice (only where the search may recompute; for engines that do not recompute layer by
    layer one number: which of what they can).
    """

    job: Job
    budget: Budget
    works: list[Work]
    #: tasks that were simulated, and that would have been without delta simulation
    simulated: int = 0
    whole: int = 0
    _last: dict[Layout, Timeline] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.evaluator = Evaluator(self.job, self.budget)
        self.keys = _keys(self.works)
        self.options = {key: options_of(self.job, self.budget, key, 1) for key in self.keys}
        limits, depth = self.job.limits, len(self.job.model.repeated)
        self.by_layer = limits.engine == "deepspeed"
        self.bits = (depth if self.by_layer else 1) if limits.recompute else 0

    @property
    def sizes(self) -> list[int]:
        """How many values every number has."""
        return [len(self.works), *(len(self.options[key]) for key in self.keys),
                *[2 if self.by_layer else 2 * self.job.model.depth] * self.bits]  # fmt: skip

    def at(self, point: tuple[int, ...]) -> tuple[Work, Choices] | None:
        """What a point stands for; None where it cannot be."""
        work = self.works[point[0]]
        chosen: dict[Key, Choice] = {}
        for key, index in zip(self.keys, point[1:], strict=False):
            choice = self.options[key][index]
            if choice.delta and work.layout.zero_stage == 3:
                return None
            chosen[key] = choice
        marks = point[1 + len(self.keys) :]
        if self.bits:
            layout = self._recomputed(work.layout, marks)
            if layout is None:
                return None
            work = work if layout == work.layout else work_of(self.job, layout)
        return work, Choices.of(chosen)

    def _recomputed(self, layout: Layout, marks: tuple[int, ...]) -> Layout | None:
        """``layout`` with what a point recomputes; None where its engine cannot."""
        engine = self.job.limits.engine
        if self.by_layer:
            pairs = zip(self.job.model.repeated, marks, strict=True)
            layers = tuple((layer, layer + 1) for layer, mark in pairs if mark)
            found = layout.replace(recompute=layers)
            return found if can_recompute(engine, found, self.job.model.repeated) else None
        every = [(), *recomputations(engine, layout, self.job.model.repeated)]
        return layout.replace(recompute=every[marks[0]]) if marks[0] < len(every) else None

    def cost(self, point: tuple[int, ...]) -> float:
        """Seconds of a step, infinite where it does not fit."""
        found = self.at(point)
        if found is None or not self.evaluator.fits(*found):
            return math.inf
        work, choices = found
        layout = work.layout
        times = stage_times(self.job, work, choices)
        if sample(layout)[1]:
            return seconds_of(layout, times)
        tasks, _ = tasks_of(work, times, layout.accumulation)
        place = layout.replace(recompute=())
        before = self._last.get(place)
        if before is None:
            now = simulate(tasks)
        else:
            changed = {name: task for name, task in tasks.items() if before.tasks[name] != task}
            now = before.edited(changed)
        self.simulated += now.simulated
        self.whole += len(tasks)
        self._last[place] = now
        return now.seconds


def walk_of(job: Job, budget: Budget) -> tuple[Walk, Counter[str], list[Layout]]:
    """The space of a job, what was refused, and every layout."""
    refused: Counter[str] = Counter()
    every = list(layouts(job, refused))
    placer = Placer(job)
    works = []
    for layout in every:
        # the cuts of the leaner form, so that any layer may be kept or recomputed
        placed = list(placer.places(layout, True))
        if placed:
            works.append(placed[-1])
        else:
            refused[placer.unable.get(layout, NO_ROOM)] += 1
    return Walk(job, budget, works), refused, every


def annealed(job: Job, budget: Budget) -> Found:
    """The best point of every chain, ranked; ``spread`` says how far the chains are apart."""
    walk, refused, every = walk_of(job, budget)
    if not walk.works:
        return nothing(job, Placer(job), every, Found((), refused=dict(refused)))
    limits = job.limits
    found = anneal(walk.sizes, walk.cost, seed=limits.seed, chains=limits.chains,
                   proposals=limits.proposals)  # fmt: skip
    place = walk.at(found.choices)
    if place is None or math.isinf(found.cost):
        reason = "no point of the walk fits; take more proposals, or enumerate"
        return Found((), refused=dict(refused), reason=reason)
    plan = plan_of(job, *place, budget.name)
    return Found((plan,), len(every), walk.simulated, found.spread, dict(refused))


def _keys(works: list[Work]) -> list[Key]:
    """Keys that any of the layouts sends something for, in the block's order."""
    seen = {
        item.key
        for work in works for stage in work.stages
        for items in (stage.micro, stage.reduce, stage.gather, stage.copies,
                      *(part for one in (*stage.forward, *stage.backward)
                        for part in (one.items, one.sent)))
        for item in items if not item.fixed and item.call.ranks > 1
    }  # fmt: skip
    return [key for key in KEYS if key in seen]
