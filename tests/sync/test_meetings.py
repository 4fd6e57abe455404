"""Meetings of three ranks against simulations of the published recurrences, in fp64."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import Channels
from hybridcomp.config import CompressionConfig
from hybridcomp.job import small_messages
from hybridcomp.sync import IslandMeetings, Masters, islands_of
from tests.ranks import run_ranks
from tests.sync import simulated
from tests.sync.simulated import NUMEL, Quadratic, first

ISLANDS, STEPS, EVERY = 3, 20, 4


def meetings_of(weights: Tensor, **sync: Any) -> IslandMeetings:
    block = CompressionConfig.parse({"sync": {"islands": 1, "every": EVERY, **sync}})
    pieces = [("a", 5), ("b", NUMEL - 5)]  # two tensors, with fragments across their border
    masters = Masters(
        pieces, lambda: torch.split(weights, [5, NUMEL - 5]), lambda: None, replicated=True
    )
    return IslandMeetings(Channels(block)["sync"], islands_of(1), lambda: masters, print)


def trained(steps: int = STEPS, **sync: Any) -> Tensor:
    """Return the weights of this rank's island; all begin with the first one's."""
    loss = Quadratic.of(dist.get_rank())
    weights = first() + dist.get_rank()
    meetings = meetings_of(weights, **sync)
    for step in range(steps):
        meetings.before_step()
        weights.copy_(loss.step(weights))
        meetings.after_step(step)
        staleness = meetings.config.staleness
        assert len(meetings.under_way) <= max(1, staleness) * len(meetings.parts)
        assert all(len(part.fragment.under_way) <= max(1, staleness) for part in meetings.parts)
    return weights


def recurrences() -> None:
    me = dist.get_rank()
    found = {
        "local": trained(preset="local-sgd"),
        "diloco": trained(preset="diloco"),
        "heavy ball": trained(outer={"lr": 0.5, "momentum": 0.9, "nesterov": False}),
        "streaming": trained(preset="streaming", codec="none", fragments=3, delay=2, mix=0.25),
        "late": trained(preset="streaming", codec="none", fragments=4, delay=3, mix=0.5),
        **{f"wsp {late}": trained(preset="wsp", staleness=late) for late in (1, 2, 3)},
    }
    expected = {
        "local": simulated.diloco(ISLANDS, STEPS, EVERY, 1.0, 0.0, False),
        "diloco": simulated.diloco(ISLANDS, STEPS, EVERY, 0.7, 0.9, True),
        "heavy ball": simulated.diloco(ISLANDS, STEPS, EVERY, 0.5, 0.9, False),
        "streaming": simulated.streaming(ISLANDS, STEPS, EVERY, 3, 2, 0.25, 0.4),
        "late": simulated.streaming(ISLANDS, STEPS, EVERY, 4, 3, 0.5, 0.4),
        **{f"wsp {late}": simulated.wsp(ISLANDS, STEPS, EVERY, late) for late in (1, 2, 3)},
    }
    for name, weights in found.items():
        torch.testing.assert_close(weights, expected[name][me], rtol=0, atol=1e-10, msg=name)


def spoiled(value: float) -> None:
    """Islands with late means do not check these for NaN across their ranks."""
    waited: list[Tensor] = []

    def least(values: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        waited.append(values)
        return values

    small_messages.least = least
    loss = Quadratic.of(dist.get_rank())
    weights = first()
    meetings = meetings_of(weights, preset="streaming", codec="none", fragments=2, delay=1)
    for step in range(4 * EVERY):
        meetings.before_step()
        weights.copy_(loss.step(weights))
        if step == EVERY and dist.get_rank() == 1:
            weights[-1] = value
        meetings.after_step(step)
    row = meetings.row()
    skipped = 0.0 if math.isfinite(value) else 1.0
    assert row is not None and (row["meetings"], row["skipped"]) == (7.0 - skipped, skipped)
    assert bool(weights.isfinite().all()) and not waited


def recurrences_and_spoiled() -> None:
    recurrences()
    for value in (math.nan, math.inf, 1e200):
        spoiled(value)


def test_meetings_are_the_published_recurrences_and_late_means_wait_for_no_island() -> None:
    run_ranks(ISLANDS, recurrences_and_spoiled)
