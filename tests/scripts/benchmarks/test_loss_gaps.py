"""training_bench/loss_gaps.py: gaps per seed, their interval, verdicts."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.training_bench import loss_gaps


def log_of(losses_at: dict[int, list[float]]) -> list[dict[str, Any]]:
    return [{"step": step, "valid_losses": found} for step, found in losses_at.items()]


def test_the_gap_of_a_seed_is_the_mean_over_the_evaluations() -> None:
    native = log_of({90: [2.0, 4.0], 100: [1.0, 3.0]})
    own = log_of({90: [2.1, 4.2], 100: [1.0, 3.2]})
    one = loss_gaps.seed_gap(7, native, own)
    assert one.gap == pytest.approx((100 * 0.3 / 6 + 100 * 0.2 / 4) / 2) and one.batches == 2
    with pytest.raises(loss_gaps.GapError, match=r"evaluated at steps \[90\], native at \[90, 1"):
        loss_gaps.seed_gap(7, native, own[:1])
    with pytest.raises(loss_gaps.GapError, match="not finite"):
        loss_gaps.seed_gap(7, native, log_of({90: [2.0, 4.0], 100: [1.0, float("nan")]}))
    with pytest.raises(loss_gaps.GapError, match="no evaluation on the way"):
        loss_gaps.seed_gap(7, native, [{"step": 1, "loss": 2.0}])


def seeds_of(gaps: list[float], batches: int = 64) -> list[loss_gaps.SeedGap]:
    """Return seeds with these gaps."""
    return [loss_gaps.SeedGap(number, batches, gap) for number, gap in enumerate(gaps)]


def test_the_interval_comes_from_the_seeds() -> None:
    found = loss_gaps.found(seeds_of([0.02, 0.04, 0.06, 0.08]))
    assert found.gap == pytest.approx(0.05) and found.spread == pytest.approx(0.02582, rel=1e-3)
    assert found.half == pytest.approx(3.182 * found.spread / 2)
    assert found.word == "met" and found.more == 0
    assert found.told(100.0).endswith("over 4 seeds; at most 0.1 %: met")
    with pytest.raises(loss_gaps.GapError, match="different text"):
        loss_gaps.found([*seeds_of([0.1]), *seeds_of([0.1], batches=8)])


@pytest.mark.parametrize(
    ("gaps", "word", "more"),
    [
        ([0.30, 0.32, 0.31], "refuted", 0),
        ([-0.30, -0.32, -0.31], "met", 0),
        # spread 0.1, 0.05 below the aim: 18 seeds have an interval of 0.046, 17 one of 0.048
        ([-0.05, 0.05, 0.15], "undecided", 13),
        ([0.05], "undecided", 2),
        ([0.05, 0.15], "undecided", 1),  # two seeds: Student's t is 12.7, too wide to decide
        ([0.05, 0.1, 0.15], "undecided", 997),
    ],
)
def test_verdicts(gaps: list[float], word: str, more: int) -> None:
    found = loss_gaps.found(seeds_of(gaps))
    assert (found.word, found.more) == (word, more)
    told = found.told(120.0)
    if len(gaps) == 1:
        assert told == "gap +0.050 % of 1 seed: undecided, an interval needs 3"
    elif len(gaps) == 2:
        assert told == "gap +0.100 % of 2 seeds: undecided, an interval needs 3"
    elif more == 13:
        assert told.endswith("undecided: 13 more seeds would take 26 minutes")
    elif more:
        assert told.endswith("more than 1000 seeds, as the gap lies where the aim does")


def test_seeds_that_an_interval_needs() -> None:
    assert loss_gaps.seeds_for(0.05, 0.1) == 4  # 3.182 x 0.05 / 2 is 0.080, with three 0.124
    assert loss_gaps.seeds_for(0.3, 0.1) == 35 and loss_gaps.seeds_for(0.1, 0.0) == 1000
