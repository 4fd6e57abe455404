"""The event simulation: an order that keeps dependencies, and one task at a time a resource."""

from __future__ import annotations

import random

import pytest

from hybridcomp.errors import HybridcompError
from hybridcomp.plan.algorithms.timeline import Task, Timeline, simulate

RESOURCES = ("gpu0", "gpu1", "link", "bus")


def random_task(draw: random.Random, names: list[int]) -> Task:
    after = tuple(draw.sample(names, min(len(names), draw.randrange(4))))
    return Task(draw.choice(RESOURCES), float(draw.randrange(4)), after)


def random_tasks(draw: random.Random, count: int) -> dict[int, Task]:
    tasks: dict[int, Task] = {}
    names = draw.sample(range(10 * count), count)
    for index, name in enumerate(names):
        tasks[name] = random_task(draw, names[:index])
    return tasks


def check(timeline: Timeline) -> None:
    """Nothing begins before what it waits for has ended, and a resource does one task at a time."""
    for name, task in timeline.tasks.items():
        assert timeline.end[name] == timeline.start[name] + task.seconds
        assert all(timeline.end[other] <= timeline.start[name] for other in task.after)
    for resource in RESOURCES:
        names = [name for name in timeline.tasks if timeline.tasks[name].resource == resource]
        names.sort(key=lambda name: (timeline.start[name], timeline.end[name]))
        for first, second in zip(names, names[1:], strict=False):
            assert timeline.end[first] <= timeline.start[second]


def test_a_chain_that_overlaps() -> None:
    tasks = {
        0: Task("gpu0", 2.0), 1: Task("link", 3.0, (0,)), 2: Task("gpu0", 2.0, (0,)),
        3: Task("link", 3.0, (2,)), 4: Task("gpu1", 1.0, (1, 3)),
    }  # fmt: skip
    timeline = simulate(tasks)
    check(timeline)
    assert timeline.start == {0: 0.0, 1: 2.0, 2: 2.0, 3: 5.0, 4: 8.0}
    assert timeline.seconds == 9.0
    assert timeline.busy("link") == 6.0


def test_random_tasks_keep_their_dependencies_and_resources() -> None:
    draw = random.Random(4)
    for _ in range(100):
        check(simulate(random_tasks(draw, 30)))


def test_tasks_that_cannot_be_done_are_told() -> None:
    with pytest.raises(HybridcompError, match="task 1 waits for task 7, which is not there"):
        simulate({1: Task("link", 1.0, (7,))})
    with pytest.raises(HybridcompError, match=r"tasks \[1, 2\] wait for each other in a circle"):
        simulate({1: Task("link", 1.0, (2,)), 2: Task("link", 1.0, (1,))})
