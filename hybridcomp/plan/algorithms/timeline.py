"""Simulate the events of one training step: tasks with resources, durations and dependencies.

A resource (a device's compute, a link, the bus to the host) does one task at a time, in the order
in which they become ready, ties by the smaller name: the order of FlexFlow's simulator (Jia et al.
2019).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

from hybridcomp.errors import HybridcompError


@dataclass(frozen=True)
class Task:
    """Work that takes ``seconds`` of ``resource`` once all tasks of ``after`` have ended."""

    resource: str
    seconds: float
    after: tuple[int, ...] = ()


@dataclass
class Timeline:
    """Start and end of every task, in seconds from the start of the step."""

    tasks: dict[int, Task]
    #: by task, in the order in which they are begun
    start: dict[int, float] = field(default_factory=dict)
    end: dict[int, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds at which the last task ends; 0.0 without tasks."""
        return max(self.end.values(), default=0.0)

    def busy(self, resource: str) -> float:
        """Return the seconds that ``resource`` works."""
        return sum(task.seconds for task in self.tasks.values() if task.resource == resource)


def simulate(tasks: Mapping[int, Task]) -> Timeline:
    """Simulate ``tasks``, by name, and return their timeline.

    Raises HybridcompError where a task waits for one that is not there, or in a circle.
    """
    found = Timeline(dict(tasks))
    free: dict[str, float] = {}
    followers: dict[int, list[int]] = {}
    missing: dict[int, int] = {}
    heap: list[tuple[float, int]] = []
    for name, task in tasks.items():
        waits = set(task.after)
        for other in waits:
            if other not in tasks:
                raise HybridcompError(f"task {name} waits for task {other}, which is not there")
            followers.setdefault(other, []).append(name)
        missing[name] = len(waits)
        if not waits:
            heap.append((0.0, name))
    heapq.heapify(heap)
    while heap:
        ready, name = heapq.heappop(heap)
        task = tasks[name]
        found.start[name] = max(ready, free.get(task.resource, 0.0))
        found.end[name] = free[task.resource] = found.start[name] + task.seconds
        for other in followers.get(name, ()):
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(heap, (_ready(tasks[other], found.end), other))
    if len(found.end) != len(tasks):
        stuck = sorted(set(tasks) - set(found.end))
        raise HybridcompError(f"tasks {stuck[:8]} wait for each other in a circle")
    return found


def _ready(task: Task, end: Mapping[int, float]) -> float:
    return max((end[other] for other in task.after), default=0.0)
