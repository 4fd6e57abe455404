"""Trials of slicings with real steps: the fastest is chosen, and no state remains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hybridcomp import log
from hybridcomp.channels import Channels
from hybridcomp.config import CompressionConfig
from hybridcomp.nn.slices import (
    FittedTimes,
    SlicedStage,
    SliceTimes,
    chosen_slices,
    trials,
    tried_slices,
)
from tests.nn.slices.model import GRANULE, LENGTH, STAGES, stage
from tests.ranks import RunRanks

LINE = [0.05, 10.0, 50.0, 60.0, 2.0]


def known() -> SliceTimes:
    """Use times in which later slices take clearly longer."""
    each = FittedTimes(LINE, LINE, [0.0, 0.0], [0.0, 0.0])
    return SliceTimes([each], STAGES, GRANULE, LENGTH // GRANULE)


def test_candidates_are_the_predicted_ones_and_the_best_equal_ones() -> None:
    times = known()
    candidates = trials.candidates(times)
    seconds = [way.seconds(STAGES) for way in candidates]
    assert candidates[0] == times.fastest() and seconds[0] == min(seconds)
    assert max(seconds) <= trials.WORSE * seconds[0]
    even = [times.uniform(parts) for parts in (1, 2, 3, 4, 6, 8, 12, 16)]
    assert min(even, key=lambda way: way.seconds(STAGES)) in candidates
    assert len(trials.candidates(times, most=2)) == 2
    assert len({way.stops for way in trials.candidates(times, worse=100.0)}) == trials.MOST
    assert trials.candidates(times, worse=1.0) == candidates[:1]


def test_dearer_calls_make_fewer_slices() -> None:
    times = known()
    fewer, more = (times.fastest(dearer=(factor - 1) * 10 * times.call) for factor in (2.0, 0.5))
    assert len(fewer.stops) < len(times.fastest().stops) <= len(more.stops)
    assert times.of(fewer.stops) == fewer and fewer.seconds(STAGES) > times.fastest().seconds(2)


def untouched() -> list[tuple[int, ...]]:
    """Return the state that real trials must preserve; then the fastest slices."""
    block = {"pp": {"codec": "blockint", "bits": 8}, "min_bytes": 0}
    channels = Channels(CompressionConfig.parse(block))
    model = stage(channels)
    before = [value.clone() for value in model.state_dict().values()]
    random = torch.get_rng_state()
    lengths = [way.slices.lengths(GRANULE) for way in tried_slices(model, known(), 2, turns=1)]
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not channels.ledger.interval["pp", "forward"].messages and channels.step == 0
    assert model.slices == (LENGTH,)
    return lengths


def test_trials_leave_nothing_behind(on_ranks: RunRanks) -> None:
    first, other = on_ranks(STAGES, untouched)
    expected = {way.lengths(GRANULE) for way in trials.candidates(known())}
    assert first == other and set(first) == expected


def steps(seconds: Callable[[tuple[int, ...]], float]) -> Any:
    """Return step times by ``seconds`` of their slices, longer on the later stage."""

    class Steps:
        def __init__(self, _: SlicedStage, lengths: tuple[int, ...], batch: int) -> None:
            self.lengths = lengths

        def __call__(self) -> float:
            ran.append(self.lengths)
            return seconds(self.lengths) * (1 + dist.get_rank())

    ran: list[tuple[int, ...]] = []
    return ran, patch.object(trials, "_Steps", Steps)


def decided(equal: float, limit: float) -> tuple[Any, ...]:
    """Return the choice if equal slices take so many seconds and all others 1."""
    ran, steps_take = steps(lambda lengths: 1.0 if max(lengths) - min(lengths) > GRANULE else equal)
    said: list[str] = []
    with (
        steps_take,
        patch.object(trials, "slice_times", lambda *_, **__: known()),
        patch.object(log, "say", said.append),
    ):
        model = stage()
        chosen = chosen_slices(model, LENGTH, granule=GRANULE, turns=3, limit=limit)
        assert chosen_slices(model, LENGTH, granule=GRANULE, turns=0)[0] == known().fastest()
    return chosen, ran, said


def test_single_steps_do_not_outvote_the_prediction() -> None:
    predicted, moody, faster = [1.0] * 4, [0.5, 0.5, 1.1, 1.1], [0.9, 0.9, 0.9, 1.1]
    assert trials._taken([predicted, moody]) == 0
    assert trials._taken([predicted, moody, faster]) == 2
    assert trials._taken([predicted, [1.1] * 4]) == 0


@pytest.mark.parametrize(("equal", "limit", "turns"), [(0.9, 60.0, 4), (1.1, 60.0, 4), (0.9, 1, 1)])
def test_a_real_step_has_the_last_word(
    on_ranks: RunRanks, equal: float, limit: float, turns: int
) -> None:
    first, other = on_ranks(STAGES, decided, equal, limit)
    assert first == other
    (slices, granule), ran, said = first
    ways = trials.candidates(known())
    assert granule == GRANULE and len(ran) == turns * len(ways) and len(ways) > 1
    assert slices in ways and (slices == ways[0]) == (equal > 1)
    (line,) = said
    lengths = ",".join(map(str, slices.lengths(GRANULE)))
    assert line.startswith(f"token slices by real steps: {lengths} ")
    assert f" {2 * min(equal, 1.0):.3g} s (predicted " in line, "the slowest rank counts"
