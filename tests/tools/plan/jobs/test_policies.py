"""Placement of jobs; the search's expected result is never worse than greedy's."""

from __future__ import annotations

import itertools
import random

import pytest

from hybridcomp.tools.plan.jobs.policies import Evolution, FirstIn, choices, greedy
from hybridcomp.tools.plan.jobs.replay import compared, replay
from hybridcomp.tools.plan.jobs.state import ClusterState, JobRates, Shape
from tests.selection import by_day


def shape(nodes: int = 2, of_node: int = 4) -> Shape:
    return Shape(tuple(tuple(range(n * of_node, (n + 1) * of_node)) for n in range(nodes)))


def task(name: str, total: float = 1000.0, power: float = 0.8, **more: object) -> JobRates:
    """Return a job with rate ``ranks ** power`` on every number of ranks of ``shape``."""
    rates = {size: float(size) ** power for size in shape().sizes}
    return JobRates(name, **{"rates": rates, "total": total, "asked": 4, **more})  # type: ignore[arg-type]


def state(*tasks: JobRates, where: Shape | None = None, **more: object) -> ClusterState:
    known = {one.name: one for one in tasks}
    left = {one.name: one.total for one in tasks}
    return ClusterState(where or shape(), known, left, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nodes", "of_node", "sizes"),
    [(1, 4, (1, 2, 4)), (3, 8, (1, 2, 4, 8, 16, 24)), (2, 6, (1, 3, 6, 12)), (1, 1, (1,))],
)
def test_numbers_of_ranks_are_parts_of_a_node_and_whole_nodes(
    nodes: int, of_node: int, sizes: tuple[int, ...]
) -> None:
    assert shape(nodes, of_node).sizes == sizes


def test_what_keeps_its_number_of_ranks_stays_where_it_is() -> None:
    found = state(task("a"), task("b"), task("c"), running={"a": (4, 5), "b": (0, 1, 2, 3)}).place(
        {"a": 2, "b": 2, "c": 4}
    )
    assert found == {"a": (4, 5), "b": (6, 7), "c": (0, 1, 2, 3)}


def test_jobs_in_the_way_of_a_whole_node_move_and_pay_for_it() -> None:
    running = {"a": (0, 1), "b": (4, 5)}
    now = state(task("a"), task("b"), task("c"), running=running, begun=frozenset("ab"), pause=9.0)
    found = now.place({"a": 2, "b": 2, "c": 4})
    assert found is not None
    assert len({rank // 4 for rank in found["c"]}) == 1, "c has a node for itself"
    moved = [name for name in "ab" if found[name] != running[name]]
    assert len(moved) == 1
    stays = state(task("a"), task("b"), task("c"), running=running, pause=9.0)
    apart = now.expected({"a": 2, "b": 2, "c": 4}) - stays.expected({"a": 2, "b": 2, "c": 4})
    assert apart == pytest.approx(9.0 / 3)


def test_expected_seconds_of_an_allocation_by_hand() -> None:
    one, two, three = task("a", 400.0, 1.0), task("b", 800.0, 1.0), task("c", 80.0, 1.0)
    now = state(one, two, three, where=shape(1))
    # a ends after 200 s on 2 ranks, b after 400; c waits for a and takes 80 s on a quarter
    assert now.expected({"a": 2, "b": 2}) == pytest.approx((200 + 400 + 280) / 3)
    assert now.expected({"a": 4, "b": 4}) == float("inf")
    heavy = state(one, task("b", 800.0, 1.0, priority=2.0), where=shape(1))
    assert heavy.expected({"a": 2, "b": 2}) == pytest.approx((200 + 2 * 400) / 3)


def drawn(seed: int) -> ClusterState:
    """Draw a cluster state: some jobs are running, one of them fixed."""
    chance = random.Random(seed)
    where = shape(chance.choice((1, 2, 3)), chance.choice((2, 4, 8)))
    tasks, running, free = [], {}, list(range(where.world_size))
    for number in range(chance.randint(1, 9)):
        able = chance.sample(where.sizes, chance.randint(1, len(where.sizes)))
        power, name = chance.uniform(0.2, 1.0), f"{number}"
        rates = {size: size**power for size in sorted(able)}
        has = min(able)
        is_fixed = False
        if chance.random() < 0.6 and has <= where.of_node:
            node = next((n for n in where.nodes if len(set(n) & set(free)) >= has), None)
            if node is not None:
                running[name] = tuple(sorted(set(node) & set(free))[:has])
                free = [rank for rank in free if rank not in running[name]]
                is_fixed = chance.random() < 0.3
        rates = {has: rates[has]} if is_fixed else rates
        tasks.append(JobRates(name, rates, chance.uniform(10, 5000), has, number,
                          chance.choice((1.0, 3.0)), is_fixed))  # fmt: skip
    known = {one.name: one for one in tasks}
    left = {one.name: one.total * chance.uniform(0.1, 1.0) for one in tasks}
    return ClusterState(where, known, left, running, frozenset(running), chance.choice((0.0, 60.0)))


@pytest.mark.parametrize("seed", by_day(range(40), range(8)))
def test_a_decision_is_never_expected_to_be_worse_than_greedy(seed: int) -> None:
    now = drawn(seed)
    found, again = Evolution(seed)(now), Evolution(seed)(now)
    assert found == again, "the same input has the same answer"
    assert now.expected(found) <= now.expected(greedy(now))
    for answer in (found, greedy(now), FirstIn()(now)):
        places = now.place(answer)
        assert places is not None and places.keys() == answer.keys()
        every = [rank for ranks in places.values() for rank in ranks]
        assert len(every) == len(set(every)) and set(every) <= set(range(now.shape.world_size))
        for name, ranks in places.items():
            assert len(ranks) in now.tasks[name].rates
            nodes = {rank // now.shape.of_node for rank in ranks}
            assert len(nodes) == -(-len(ranks) // now.shape.of_node), "on as few nodes as possible"
            if now.tasks[name].is_fixed:
                assert ranks == now.running[name]
        assert now.fixed.keys() <= places.keys()


@pytest.mark.parametrize("seed", by_day(range(8), range(3)))
def test_a_small_search_comes_near_the_best_of_all_allocations(seed: int) -> None:
    chance = random.Random(seed)
    now = state(*(task(name, chance.uniform(10, 5000), chance.uniform(0.3, 1.0))
                   for name in "abcd"))  # fmt: skip
    every = itertools.product(*(choices(now, name) for name in now.tasks))
    best = min(
        now.expected({name: size for name, size in zip(now.tasks, one, strict=True) if size})
        for one in every
    )
    assert now.expected(Evolution()(now)) <= 1.05 * best


def test_the_last_population_is_refreshed() -> None:
    """Ended jobs are removed from it, and new ones are added."""
    search = Evolution(kept=[{"gone": 4, "a": 4}, {"a": 3}])
    assert search(state(task("a"), task("b"))).keys() == {"a", "b"}
    assert search.kept and all({*one} <= {"a", "b"} for one in search.kept)
    assert search(state()) == {}


def test_priority_decides_who_gets_the_ranks() -> None:
    now = state(task("a", power=0.9), task("b", power=0.9, priority=50.0))
    found = Evolution()(now)
    assert found["b"] > found.get("a", 0)


def test_first_in_first_out_moves_nobody() -> None:
    running = {"a": (0, 1), "b": (4, 5)}
    now = state(task("a"), task("b"), task("c"), running=running)
    assert FirstIn()(now) == {"a": 2, "b": 2}, "c asked for a whole node and waits for one"


def test_a_replay_by_hand() -> None:
    """Two jobs of 400 samples on one node: a rank trains a sample a second."""
    one, two = task("a", 400.0, 1.0), task("b", 400.0, 1.0, arrival=50.0)
    where = shape(1)
    fifo = replay([one, two], where, 30.0, FirstIn())
    assert fifo.mean_seconds == pytest.approx((100 + 150) / 2)
    assert fifo.last_seconds == pytest.approx(200.0) and fifo.changes == 0
    halves = replay([one, two], where, 30.0, lambda now: dict.fromkeys(now.tasks, 2))
    # a has 300 samples left at 50 s, running alone on 2 ranks: it continues undisturbed
    assert halves.mean_seconds == pytest.approx((200 + 200) / 2) and halves.changes == 0

    def grows(now: ClusterState) -> dict[str, int]:
        return {name: 4 // len(now.tasks) for name in now.tasks}

    # a: 200 samples by 50 s, then 30 s of pause and 100 s on 2 ranks; b: 260 by then, 30 s, 4 ranks
    changed = replay([one, two], where, 30.0, grows)
    ends = 50 + 30 + 100, 50 + 130 + 30 + (400 - 260) / 4
    assert changed.mean_seconds == pytest.approx((ends[0] + ends[1] - 50) / 2)
    assert changed.changes == 2
    found = compared([one, two], where, 30.0)
    assert [*found] == ["first in, first out", "best fixed size", "greedy", "evolutionary"]
    assert found["best fixed size"].mean_seconds <= fifo.mean_seconds
