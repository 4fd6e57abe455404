"""Token slices: equal to brute force, unequal where later slices attend to more."""

from __future__ import annotations

import random
from functools import partial
from itertools import combinations, pairwise

import pytest

from hybridcomp.plan.algorithms.slices import Slices, token_slices, uniform_slices


def brute(granules: int, stages: int, cost: dict[tuple[int, int], float]) -> float:
    """The fastest of all 2^(granules - 1) ways to slice."""
    best = float("inf")
    for count in range(granules):
        for inner in combinations(range(1, granules), count):
            times = [cost[cut] for cut in pairwise((0, *inner, granules))]
            best = min(best, sum(times) + (stages - 1) * max(times))
    return best


def seconds_of(cost: dict[tuple[int, int], float], start: int, stop: int) -> float:
    return cost[start, stop]


def test_as_fast_as_brute_force() -> None:
    draw = random.Random(20)
    for _ in range(300):
        granules, stages = draw.randint(1, 9), draw.randint(1, 8)
        cost = {
            (start, stop): draw.choice([1, 2, 3, 5]) * draw.random() + 0.1 * draw.random()
            for start in range(granules)
            for stop in range(start + 1, granules + 1)
        }
        found = token_slices(granules, stages, partial(seconds_of, cost))
        times = [cost[cut] for cut in pairwise((0, *found.stops))]
        assert found.stops[-1] == granules
        assert found.slowest == max(times)
        assert found.total == pytest.approx(sum(times))
        assert found.seconds(stages) == pytest.approx(brute(granules, stages, cost), rel=1e-12)


def attention(start: int, stop: int) -> float:
    """A launch, products by token, and attention to all the tokens before."""
    pairs = (stop * (stop + 1) - start * (start + 1)) / 2
    return 0.3 + 1.0 * (stop - start) + 0.05 * pairs


def test_later_slices_are_shorter_and_better_than_equal_ones() -> None:
    best = token_slices(64, 4, attention)
    lengths = best.lengths(16)
    assert sum(lengths) == 64 * 16
    assert lengths[0] > lengths[-1]
    assert best.seconds(4) < token_slices(64, 1, attention).seconds(4), "unsliced"
    equal = [uniform_slices(64, count, attention).seconds(4) for count in range(1, 65)]
    assert best.seconds(4) < min(equal)


def test_one_stage_takes_the_sequence_whole() -> None:
    assert token_slices(64, 1, attention).stops == (64,)
    assert Slices((2, 3), 2.0, 3.0).seconds(4) == 9.0


@pytest.mark.parametrize(("granules", "stages"), [(0, 1), (1, 0)])
def test_nothing_to_slice_is_an_error(granules: int, stages: int) -> None:
    with pytest.raises(ValueError, match="at least 1 each"):
        token_slices(granules, stages, attention)
    with pytest.raises(ValueError, match="expected 1 to"):
        uniform_slices(3, granules * 4, attention)
