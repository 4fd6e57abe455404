"""The event simulation, its edits, and the search over choices."""

from __future__ import annotations

import random
from itertools import product

import pytest

from hybridcomp.errors import HybridcompError
from hybridcomp.plan.algorithms.anneal import anneal
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
        names = [name for name in timeline.order if timeline.tasks[name].resource == resource]
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


def test_delta_simulation_equals_full_simulation() -> None:
    draw, saved, edits = random.Random(4), 0, 0
    while edits < 2000:
        timeline = simulate(random_tasks(draw, 30))
        check(timeline)
        for _ in range(20):
            names = list(timeline.order)
            changed, removed = {}, []
            for name in draw.sample(names, 2):
                earlier = names[: names.index(name)]
                changed[name] = random_task(draw, earlier)
            if draw.random() < 0.3:
                changed[1000 + edits] = random_task(draw, [n for n in names if n not in changed])
            needed = {other for task in {**timeline.tasks, **changed}.values()
                      for other in task.after}  # fmt: skip
            leaves = [name for name in names if name not in needed and name not in changed]
            if leaves and draw.random() < 0.3:
                removed = [draw.choice(leaves)]
            tasks = {n: t for n, t in {**timeline.tasks, **changed}.items() if n not in removed}
            try:
                whole = simulate(tasks)
            except HybridcompError:
                with pytest.raises(HybridcompError):
                    timeline.edited(changed, removed)
                continue
            edited = timeline.edited(changed, removed)
            assert edited.start == whole.start
            assert edited.end == whole.end
            assert edited.order == whole.order
            saved += whole.simulated - edited.simulated
            timeline, edits = edited, edits + 1
    assert saved > 2000  # tasks that were not simulated again


def test_tasks_that_cannot_be_done_are_told() -> None:
    with pytest.raises(HybridcompError, match="task 1 waits for task 7, which is not there"):
        simulate({1: Task("link", 1.0, (7,))})
    with pytest.raises(HybridcompError, match=r"tasks \[1, 2\] wait for each other in a circle"):
        simulate({1: Task("link", 1.0, (2,)), 2: Task("link", 1.0, (1,))})


def test_annealing_finds_the_enumerated_optimum() -> None:
    hits = 0
    for seed in range(100):
        draw = random.Random(seed)
        options = [draw.randrange(2, 5) for _ in range(6)]
        alone = [[draw.random() for _ in range(count)] for count in options]
        pairs = [
            [[draw.random() for _ in range(right)] for _ in range(left)]
            for left, right in zip(options, options[1:], strict=False)
        ]

        def cost(choices: tuple[int, ...]) -> float:
            own = sum(row[choice] for row, choice in zip(alone, choices, strict=True))  # noqa: B023
            return own + sum(
                table[left][right]
                for table, left, right in zip(pairs, choices, choices[1:], strict=False)  # noqa: B023
            )

        best = min(cost(choices) for choices in product(*map(range, options)))
        found = anneal(options, cost, seed=seed, proposals=500)
        assert found.cost == cost(found.choices) >= best
        assert len(found.by_chain) == 4 and found.spread >= 1.0
        assert anneal(options, cost, seed=seed, proposals=500) == found
        hits += found.cost == best
    assert hits >= 95
