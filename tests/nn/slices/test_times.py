"""Linear fits of slice times: exact for linear times, and the slices chosen from them."""

from __future__ import annotations

import time
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hybridcomp.channels import Channels
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import PeerError
from hybridcomp.nn.slices import FittedTimes, SliceTimes, chosen_slices, slice_times, timing
from hybridcomp.nn.slices.times import fitted, of_computing
from tests.nn.slices.model import GRANULE, LENGTH, STAGES, stage
from tests.ranks import RunRanks, run_ranks

FIRST, LATER = [0.04, 9.0, 25.0, 0.0, 1.0], [0.05, 10.0, 50.0, 60.0, 2.0]
POST, ARRIVE = [0.02, 0.5], [0.1, 3.0]


def test_a_line_is_found_again() -> None:
    cuts = [(a, b) for a, b in combinations(range(0, 60, 7), 2) if a]
    parts = [of_computing(*cut) for cut in cuts]
    line = [0.3, 0.0, 40.0, 70.0, 5.0]
    seconds = [sum(a * b for a, b in zip(line, part, strict=True)) for part in parts]
    assert fitted(parts, seconds) == pytest.approx(line, abs=1e-6)


def test_no_part_takes_less_than_nothing() -> None:
    parts = [of_computing(8, stop) for stop in range(9, 30)]
    falling = [1.0 / stop for stop in range(9, 30)]
    assert min(fitted(parts, falling)) >= 0.0


def test_the_first_slice_has_a_line_of_its_own_and_messages_hide() -> None:
    times = FittedTimes(FIRST, LATER, POST, ARRIVE)
    first = 0.04 + 9.0 * 0.1 + 25.0 * 0.01 + 0.1
    later = 0.05 + 10.0 * 0.1 + 50.0 * 0.01 + 60.0 * 0.02 + 2.0 * 0.3
    post, arrive = 0.02 + 0.05, 0.1 + 0.3
    assert times.seconds(0, 100) == pytest.approx(first + post)
    assert times.seconds(200, 300) == pytest.approx(later + post)
    assert times.hop(200, 300) == pytest.approx(arrive - post)
    slow = FittedTimes(FIRST, LATER, POST, [9.0, 3.0])
    assert slow.seconds(200, 300) == pytest.approx(9.3), "the link sets the pace"


def test_the_slowest_stage_counts_and_the_chosen_slices_win() -> None:
    quick = FittedTimes([w / 2 for w in FIRST], [w / 2 for w in LATER], POST, ARRIVE)
    times = SliceTimes([quick, FittedTimes(FIRST, LATER, POST, ARRIVE)], 4, 100, 10)
    assert times.seconds(2, 3) == times.each[1].seconds(200, 300) > quick.seconds(200, 300)
    best = times.fastest().seconds(4)

    def taken(stops: tuple[int, ...]) -> float:
        cuts = list(pairwise((0, *stops, 10)))
        full = [times.seconds(*cut) + times.hop(*cut) for cut in cuts]
        return sum(times.seconds(*cut) for cut in cuts) + 3 * max(full)

    every = (taken(stops) for n in range(10) for stops in combinations(range(1, 10), n))
    assert best == pytest.approx(min(every))
    assert best <= min(times.uniform(parts).seconds(4) for parts in range(1, 11))


def measured(block: dict[str, Any] | None) -> SliceTimes:
    """Measure real times; return the state that they must preserve."""
    channels = None if block is None else Channels(CompressionConfig.parse(block))
    model = stage(channels)
    before = torch.get_rng_state()
    times = slice_times(model, LENGTH, 2, granule=GRANULE, repeats=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    return times


@pytest.mark.parametrize(
    "block", [None, {"pp": {"codec": "blockint", "bits": 8}, "min_bytes": 0}], ids=["native", "8"]
)
def test_all_ranks_learn_the_times_of_all(on_ranks: RunRanks, block: dict[str, Any] | None) -> None:
    first, other = on_ranks(STAGES, measured, block)
    assert first == other and len(first.each) == first.stages == STAGES
    assert first.granule * first.count == LENGTH
    for each in first.each:
        lines = [*each.first, *each.later, *each.post, *each.arrive]
        assert min(lines) >= 0.0 and max(each.first) > 0 < max(each.later) and max(each.arrive) > 0
    fastest = first.fastest()
    assert sum(fastest.lengths(GRANULE)) == LENGTH and fastest.seconds(STAGES) > 0


def frozen_first() -> tuple[Any, ...]:
    whole = stage()
    whole.requires_grad_(dist.get_rank() > 0)
    return chosen_slices(whole, LENGTH, granule=GRANULE, repeats=1, turns=1)


def test_a_frozen_first_stage_is_timed_too(on_ranks: RunRanks) -> None:
    """It has no backward pass, and its neighbour must not wait for it."""
    first, other = on_ranks(STAGES, frozen_first)
    assert first == other and sum(first[0].lengths(GRANULE)) == LENGTH


def fails_alone() -> str:
    def once(timer: timing._Timer, start: int, stop: int) -> float:
        if dist.get_rank() == 1:
            raise RuntimeError("no memory is left")
        return 0.1

    with patch.object(timing._Timer, "_once", once), pytest.raises(PeerError) as error:
        slice_times(stage(), LENGTH, 2, granule=GRANULE, repeats=1)
    return str(error.value)


def test_a_stage_that_fails_keeps_no_other_waiting() -> None:
    error = "timing token slices: rank 1: RuntimeError: no memory is left"
    assert run_ranks(STAGES, fails_alone) == [error] * STAGES


def chosen() -> tuple[Any, ...]:
    """Return the slices chosen for known linear times, the second stage twice as slow."""
    factor = 1 + dist.get_rank()

    def once(timer: timing._Timer, start: int, stop: int) -> float:
        line = LATER if start else FIRST
        return factor * sum(a * b for a, b in zip(line, of_computing(start, stop), strict=True))

    with (
        patch.object(timing._Timer, "_once", once),
        patch.object(timing, "_messages", lambda *_: (POST, ARRIVE)),
    ):
        return chosen_slices(stage(), LENGTH, granule=GRANULE, turns=0)


def test_chosen_slices_are_the_best_by_what_was_timed(on_ranks: RunRanks) -> None:
    (slices, granule), other = on_ranks(STAGES, chosen)
    assert (slices, granule) == other and granule == GRANULE
    first, later = ([2 * weight for weight in line] for line in (FIRST, LATER))
    slowest = FittedTimes(first, later, POST, ARRIVE)
    known = SliceTimes([slowest], STAGES, GRANULE, LENGTH // GRANULE)
    best = known.fastest()
    assert slices.stops == best.stops
    assert slices.seconds(STAGES) == pytest.approx(best.seconds(STAGES), rel=1e-4)
    assert len(slices.stops) > 1


def test_posting_a_message_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Synchronizing a GPU would include the posted message, which a stage does not wait for."""
    under_way: list[str] = []

    class Message:
        def wait(self) -> None:
            time.sleep(0.05)
            under_way.clear()

    def now(device: torch.device) -> float:
        if under_way:
            time.sleep(0.05)
        return time.perf_counter()

    def isend(*_: object, **__: object) -> Message:
        under_way.append("a message")
        return Message()

    monkeypatch.setattr(timing, "now", now)
    monkeypatch.setattr(dist, "isend", isend)
    pipeline: Any = SimpleNamespace(
        is_first=True, is_last=False, dtype=torch.bfloat16, device=torch.device("cpu"), group=None,
        channels=lambda: None, neighbour=lambda ahead, way: 1,
    )  # fmt: skip
    post, arrive = timing._exchange(pipeline, 8, "forward")
    assert post < 0.04 and arrive >= 0.05
