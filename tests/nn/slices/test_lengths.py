"""Lengths of token slices: equal to brute force, unequal as later slices attend to more."""

from __future__ import annotations

import random
from functools import partial
from itertools import combinations, pairwise

import pytest

from hybridcomp.nn.slices.lengths import Slices, token_slices, uniform_slices

Cost = dict[tuple[int, int], float]


def brute(granules: int, stages: int, cost: Cost, hops: Cost) -> float:
    """Return the fastest of all 2^(granules - 1) slicings."""
    best = float("inf")
    for count in range(granules):
        for inner in combinations(range(1, granules), count):
            cuts = list(pairwise((0, *inner, granules)))
            slowest = max(cost[cut] + hops[cut] for cut in cuts)
            best = min(best, sum(cost[cut] for cut in cuts) + (stages - 1) * slowest)
    return best


def seconds_of(cost: Cost, start: int, stop: int) -> float:
    return cost[start, stop]


@pytest.mark.parametrize("longest", [0.0, 4.0])
def test_as_fast_as_brute_force(longest: float) -> None:
    draw = random.Random(20)
    for _ in range(300):
        granules, stages = draw.randint(1, 9), draw.randint(1, 8)
        cost = {
            (start, stop): draw.choice([1, 2, 3, 5]) * draw.random() + 0.1 * draw.random()
            for start in range(granules)
            for stop in range(start + 1, granules + 1)
        }
        hops = {cut: longest * draw.random() for cut in cost}
        hop = partial(seconds_of, hops)
        best = token_slices(granules, stages, partial(seconds_of, cost), hop)
        cuts = list(pairwise((0, *best.stops)))
        assert best.stops[-1] == granules
        assert best.slowest == max(cost[cut] + hops[cut] for cut in cuts)
        assert best.total == pytest.approx(sum(cost[cut] for cut in cuts))
        expected = brute(granules, stages, cost, hops)
        assert best.seconds(stages) == pytest.approx(expected, rel=1e-12)


def attention(start: int, stop: int) -> float:
    """Return the time of a launch, products by token, and attention to all preceding tokens."""
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


def test_hops_fill_the_pipeline_once() -> None:
    uniform = uniform_slices(4, 2, attention, lambda start, stop: 10.0 * (start == 0))
    assert uniform.slowest == attention(0, 2) + 10.0 > attention(2, 4)
    assert uniform.total == attention(0, 2) + attention(2, 4)


def test_one_stage_takes_the_sequence_whole() -> None:
    assert token_slices(64, 1, attention).stops == (64,)
    assert Slices((2, 3), 2.0, 3.0).seconds(4) == 9.0


@pytest.mark.parametrize(("granules", "stages"), [(0, 1), (1, 0)])
def test_nothing_to_slice_is_an_error(granules: int, stages: int) -> None:
    with pytest.raises(ValueError, match="at least 1 each"):
        token_slices(granules, stages, attention)
    with pytest.raises(ValueError, match="expected 1 to"):
        uniform_slices(3, granules * 4, attention)
