"""Decide how many ranks each job gets: first in, first out, greedily, or by evolution."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hybridcomp.tools.plan.jobs.state import Allocation, ClusterState, JobRates

#: chooses the number of ranks of each job, at every arrival and end of a job
Policy = Callable[[ClusterState], Mapping[str, int]]
#: an allocation as a hashable key
Key = tuple[tuple[str, int], ...]
POPULATION, GENERATIONS, KEPT = 16, 25, 6
#: probability that free ranks go to the job that gains most, probability that a child mutates,
#: and expected number of jobs that a mutation gives another number of ranks
GREEDILY, MUTATED, CHANGED = 0.7, 0.5, 1.5


@dataclass(frozen=True)
class FirstIn:
    """Start jobs in order of arrival, with the ranks they asked for, which never change.

    size: ranks for every job instead, rounded up to a number of ranks that the job can have.
    """

    size: int | None = None

    def __call__(self, state: ClusterState) -> dict[str, int]:
        """Return the running jobs, and the next jobs that fit."""
        found = {name: len(ranks) for name, ranks in state.running.items()}
        waiting = [one for one in state.tasks.values() if one.name not in found]
        for task in sorted(waiting, key=lambda one: (one.arrival, one.name)):
            tried = {**found, task.name: self._size(task)}
            places = state.place(tried)
            if places is None or not state.running.items() <= places.items():
                break
            found = tried
        return found

    def _size(self, task: JobRates) -> int:
        wanted = self.size or task.asked
        return next((size for size in task.sizes if size >= wanted), task.sizes[-1])


def greedy(state: ClusterState) -> dict[str, int]:
    """Start the shortest jobs on the fewest ranks, then give free ranks to the jobs that gain most.

    Running jobs have no claim to their ranks. Each growth raises one job to its next possible
    number of ranks: the job that saves the most seconds per added rank, weighted by priority (as in
    Optimus, Peng et al., EuroSys 2018).
    """
    found = dict(state.fixed)

    def shortest(task: JobRates) -> tuple[float, str]:
        return state.seconds(task.name, task.sizes[0]) / task.priority, task.name

    for task in sorted(state.tasks.values(), key=shortest):
        tried = {**found, task.name: task.sizes[0]}
        if task.name not in found and state.fits(tried):
            found = tried
    while True:
        steps = growths(state, found)
        if not steps:
            return found
        saved = {name: seconds / (size - found[name]) for name, (size, seconds) in steps.items()}
        name = max(saved, key=lambda one: (saved[one], one))
        found[name] = steps[name][0]


def growths(state: ClusterState, allocation: Allocation) -> dict[str, tuple[int, float]]:
    """Return each gaining job's next number of ranks, and the seconds that the job would save."""
    found = {}
    for name, ranks in allocation.items():
        task = state.tasks[name]
        size = next((one for one in task.sizes if one > ranks), None)
        if size is None or task.is_fixed:
            continue
        saved = task.priority * (state.seconds(name, ranks) - state.seconds(name, size))
        if saved > 0 and state.fits({**allocation, name: size}):
            found[name] = size, saved
    return found


@dataclass
class Evolution:
    """Search the allocation with the fewest expected seconds, starting from the greedy one.

    The same states and ``seed`` give the same answers. ``kept``: the best allocations of the last
    search, from which the next search starts as well.
    """

    seed: int = 0
    kept: list[Mapping[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def __call__(self, state: ClusterState) -> dict[str, int]:
        """Return the best allocation found, which is expected to take no longer than ``greedy``'s.

        1. Refresh: jobs that have ended leave the last population, new ones are admitted.
        2. Crossover: a child has each job's ranks from one of two parents.
        3. Mutation: some jobs get another number of ranks, or none.
        4. Repair: shrink jobs until all fit, start waiting jobs, give away free ranks.
        5. Selection: the best live on. ``ClusterState.place`` assigns the ranks (ONES' reorder).
        """
        if not state.tasks:
            return {}
        draw, names = self._random, list(state.tasks)
        first = greedy(state)
        now = {name: len(ranks) for name, ranks in state.running.items()}
        people: dict[Key, float] = {}

        def add(one: Mapping[str, int]) -> None:
            key = tuple(sorted(one.items()))
            if key not in people:
                people[key] = state.expected(one)

        for one in (first, *(self._repaired(state, one) for one in (now, first, *self.kept))):
            add(one)  # 1
        for _ in range(2 * POPULATION):
            if len(people) < POPULATION:
                add(self._repaired(state, {n: draw.choice(choices(state, n)) for n in names}))
        for _ in range(GENERATIONS):
            parents = list(people)
            for _ in range(POPULATION // 2):
                pair = dict(draw.choice(parents)), dict(draw.choice(parents))
                child = {name: draw.choice(pair).get(name, 0) for name in names}  # 2
                if draw.random() < MUTATED:
                    for name in names:
                        if draw.random() < CHANGED / len(names):
                            child[name] = draw.choice(choices(state, name))  # 3
                add(self._repaired(state, child))
            best = sorted(people, key=lambda one: (people[one], one))[:POPULATION]
            people = {one: people[one] for one in best}
        self.kept = [dict(one) for one in list(people)[:KEPT]]  # 5
        return dict(next(iter(people)))

    def _repaired(self, state: ClusterState, child: Mapping[str, int]) -> dict[str, int]:
        """Return ``child`` (ranks by job, 0: it waits) with valid numbers that use all ranks."""
        draw, tasks = self._random, state.tasks
        found = {name: size for name, size in child.items()
                 if name in tasks and size in tasks[name].rates}  # fmt: skip
        found |= state.fixed
        while not state.fits(found):
            name = draw.choice([one for one in found if one not in state.fixed])
            smaller = [size for size in tasks[name].sizes if size < found[name]]
            if smaller:
                found[name] = smaller[-1]
            else:
                del found[name]
        weighed = {name: state.left[name] / task.priority for name, task in tasks.items()}
        for name in sorted(tasks, key=lambda one: (weighed[one], one)):
            tried = {**found, name: tasks[name].sizes[0]}
            if name not in found and state.fits(tried):
                found = tried
        while steps := growths(state, found):
            most = max(steps, key=lambda one: (steps[one][1], one))
            name = most if draw.random() < GREEDILY else draw.choice(list(steps))
            found[name] = steps[name][0]
        return found


def choices(state: ClusterState, name: str) -> tuple[int, ...]:
    """Return the numbers of ranks that a job may get; 0: the job waits."""
    task = state.tasks[name]
    return (state.fixed[name],) if task.is_fixed else (0, *task.sizes)
