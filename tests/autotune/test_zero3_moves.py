"""Simulate ZeRO 3's gathers: bounds, and settings close to the fewest gathers."""

from __future__ import annotations

import itertools
import random

import pytest

from hybridcomp.autotune.zero3_moves import Event, Knobs, Trace, choose, fewest, simulate

#: per layer: norm, attention, its output, norm, both matrices of the MLP
LAYER = (128, 49_344, 16_512, 128, 66_048, 65_664)


def trace_of(layers: int, persistent: int = 0) -> Trace:
    """Return the trace of a transformer without a head: modules forward, then in reverse."""
    sizes = [size for _ in range(layers) for size in LAYER]
    modules = range(len(sizes))
    forward = [Event(m, begins, True) for m in modules for begins in (True, False)]
    backward = [Event(m, begins, False) for m in reversed(modules) for begins in (True, False)]
    stay = frozenset(p for p, size in enumerate(sizes) if size <= persistent)
    return Trace((*forward, *backward), [(m,) for m in modules], sizes, stay)


def least_recent(trace: Trace, limit: int) -> int:
    """Return the elements that a pass gathers if it evicts the least recently used parameter."""
    held: dict[int, None] = {}  # by their last use
    total = 0
    for p in (p for own in trace.order for p in own):
        if p in held:
            del held[p]
        else:
            total += trace.sizes[p]
        while sum(trace.sizes[kept] for kept in held) + trace.sizes[p] > limit:
            del held[next(iter(held))]
        held[p] = None
    return total


@pytest.mark.parametrize("share", [0.2, 0.33, 0.5, 0.75])
def test_the_choice_comes_near_the_fewest_and_fits(share: float) -> None:
    trace = trace_of(12)
    limit = int(share * trace.moved)
    choice, least = choose(trace, limit), fewest(trace, limit)
    assert choice is not None and least is not None
    assert choice.moves.peak <= limit
    assert least <= choice.moves.gathered <= min(1.05 * least, least_recent(trace, limit))
    # a palindrome: parameters held at the turn are not gathered again
    assert least == 2 * trace.moved - limit


def test_a_device_for_all_gathers_once_and_one_for_a_module_twice() -> None:
    trace = trace_of(4)
    choice = choose(trace, trace.moved)
    assert choice is not None and choice.moves.gathered == trace.moved == fewest(trace, trace.moved)
    tight = choose(trace, max(LAYER))
    assert tight is not None and tight.knobs.prefetch == 0
    assert choose(trace, max(LAYER) - 1) is None and fewest(trace, max(LAYER) - 1) is None
    assert simulate(trace, Knobs(0, 0, 0)) == (2 * trace.moved, max(LAYER))


def test_persistent_parameters_are_not_moved() -> None:
    trace = trace_of(4, persistent=1000)
    assert trace.moved == sum(size for size in LAYER if size > 1000) * 4
    assert simulate(trace, Knobs(0, 0, 0)).gathered == 2 * trace.moved


def test_the_bound_holds_for_every_setting_of_every_trace() -> None:
    """Random modules over random parameters: nested, persistent or external."""
    rng = random.Random(0)
    for _ in range(60):
        count = rng.randint(3, 9)
        sizes = [rng.randint(1, 40) for _ in range(count)]
        uses = [tuple(sorted(rng.sample(range(count), rng.randint(1, 2)))) for _ in range(5)]
        events = []
        for module in rng.choices(range(5), k=10):
            inner = rng.randrange(5)
            nested = [Event(inner, True, True), Event(inner, False, True)] * (inner != module)
            events += [Event(module, True, True), *nested, Event(module, False, True)]
        trace = Trace(tuple(events), uses, sizes, frozenset(rng.sample(range(count), 1)))
        for prefetch, reuse in itertools.product((0, 10, 50), (0, 30, 300)):
            for live in (0, 60, 1000):
                moves = simulate(trace, Knobs(prefetch, live, reuse))
                bound = fewest(trace, moves.peak)
                assert bound is not None and bound <= moves.gathered


def optimum(order: list[int], room: int) -> int:
    """Return the fewest loads of one-element parameters, by a search over all evictions."""
    states = {frozenset[int](): 0}
    for p in order:
        new: dict[frozenset[int], int] = {}
        for held, cost in states.items():
            others = held - {p}
            for kept in itertools.combinations(sorted(others), min(len(others), room - 1)):
                key = frozenset({p, *kept})
                new[key] = min(new.get(key, 10**9), cost + (p not in held))
        states = new
    return min(states.values())


def test_the_bound_is_the_optimum_for_equal_sizes() -> None:
    rng = random.Random(1)
    for _ in range(60):
        count, room = rng.randint(3, 6), rng.randint(2, 4)
        order = [rng.randrange(count) for _ in range(12)]
        events = tuple(Event(p, begins, True) for p in order for begins in (True, False))
        trace = Trace(events, [(p,) for p in range(count)], [1] * count)
        assert fewest(trace, room) == optimum(order, room)


def test_parameters_that_stay_until_the_step_are_gathered_once_in_it() -> None:
    trace = trace_of(3)
    outside = Trace(trace.events, trace.uses, trace.sizes, external=frozenset({1}))
    single, three = simulate(outside, Knobs(0, 0, 0)), simulate(outside, Knobs(0, 0, 0), passes=3)
    assert single.gathered == 2 * trace.moved - LAYER[1]
    assert three.gathered == 3 * single.gathered - 2 * LAYER[1]
