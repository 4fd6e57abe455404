"""An event simulation of one training step: tasks with resources, durations and dependencies.

A resource (a device's compute, a link, the bus to the host) does one task at a time, in the order
in which they become ready, ties by the smaller name: the order of FlexFlow's simulator (Jia et al.
2019). Where one choice of a plan changes, only tasks from the first affected one on are simulated
again (``Timeline.edited``): everything that was begun before is as it was.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hybridcomp.errors import HybridcompError


@dataclass(frozen=True)
class Task:
    """Something that takes ``seconds`` of ``resource`` once all tasks of ``after`` have ended."""

    resource: str
    seconds: float
    after: tuple[int, ...] = ()


@dataclass
class Timeline:
    """When every task begins and ends, in seconds from the start of the step."""

    tasks: dict[int, Task]
    start: dict[int, float] = field(default_factory=dict)
    end: dict[int, float] = field(default_factory=dict)
    #: tasks in the order in which they were begun
    order: list[int] = field(default_factory=list)
    #: how many of them the last simulation had to look at
    simulated: int = 0

    @property
    def seconds(self) -> float:
        """When the last task ends; 0.0 without tasks."""
        return max(self.end.values(), default=0.0)

    def busy(self, resource: str) -> float:
        """Seconds that ``resource`` works."""
        return sum(task.seconds for task in self.tasks.values() if task.resource == resource)

    def edited(self, changed: Mapping[int, Task], removed: Iterable[int] = ()) -> Timeline:
        """The timeline with tasks ``changed`` (or added) and ``removed``; this one stays as it is.

        Raises HybridcompError where a task would wait for one that is not there, or in a circle.
        """
        removed = set(removed)
        tasks = {name: task for name, task in self.tasks.items() if name not in removed}
        tasks.update(changed)
        place = {name: index for index, name in enumerate(self.order)}
        keep = len(self.order)
        for name in {*changed, *removed}:
            keep = min(keep, place.get(name, keep))
        for task in changed.values():
            # it cannot be begun before what it waits for was
            waits = [place[other] + 1 for other in task.after if other in place]
            unknown = any(other not in place for other in task.after)
            keep = min(keep, max(waits, default=0) if not unknown else keep)
        return _simulated(tasks, self, keep)


def simulate(tasks: Mapping[int, Task]) -> Timeline:
    """The timeline of ``tasks``, by name.

    Raises HybridcompError where a task waits for one that is not there, or in a circle.
    """
    return _simulated(dict(tasks), Timeline({}), 0)


def _simulated(tasks: dict[int, Task], before: Timeline, keep: int) -> Timeline:
    """Simulate ``tasks``, of which the first ``keep`` that ``before`` began are as they were."""
    done = before.order[:keep]
    found = Timeline(tasks, order=list(done))
    free: dict[str, float] = {}
    for name in done:
        found.start[name], found.end[name] = before.start[name], before.end[name]
        free[tasks[name].resource] = before.end[name]
    followers: dict[int, list[int]] = {}
    missing: dict[int, int] = {}
    heap: list[tuple[float, int]] = []
    for name, task in tasks.items():
        if name in found.end:
            continue
        waits = {other for other in task.after if other not in found.end}
        for other in waits:
            if other not in tasks:
                raise HybridcompError(f"task {name} waits for task {other}, which is not there")
            followers.setdefault(other, []).append(name)
        missing[name] = len(waits)
        if not waits:
            heap.append((_ready(task, found.end), name))
    heapq.heapify(heap)
    while heap:
        ready, name = heapq.heappop(heap)
        task = tasks[name]
        found.start[name] = max(ready, free.get(task.resource, 0.0))
        found.end[name] = free[task.resource] = found.start[name] + task.seconds
        found.order.append(name)
        for other in followers.get(name, ()):
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(heap, (_ready(tasks[other], found.end), other))
    if len(found.order) != len(tasks):
        stuck = sorted(set(tasks) - set(found.order))
        raise HybridcompError(f"tasks {stuck[:8]} wait for each other in a circle")
    found.simulated = len(found.order) - keep
    return found


def _ready(task: Task, end: Mapping[int, float]) -> float:
    return max((end[other] for other in task.after), default=0.0)
