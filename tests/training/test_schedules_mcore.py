"""Two levels, the guard and a ramp on real megatron-core, if installed."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.selection import by_day
from tests.training.mcore_trainer import Job, Outcome, run

if find_spec("megatron") is None or find_spec("megatron.core") is None:
    pytest.skip("needs megatron-core", allow_module_level=True)

DP = {"codec": "blockint", "bits": 4, "error_feedback": True}
WRONG = {"codec": "zfp", "rate": 3}  # relative error 1.6 on noise, over the guard's limit
EVERY = {"min_bytes": 0, "ledger": {"sample_every": 2}}


def outcomes(ranks: int, jobs: list[Job]) -> list[list[Outcome]]:
    """Return results by job, then by rank."""
    found: list[list[Any]] = run_ranks(ranks, run, jobs, timeout=240)
    for rank in found:
        assert not [outcome for outcome in rank if isinstance(outcome, str)], rank
    return [list(job) for job in zip(*found, strict=True)]


@pytest.mark.parametrize("distributed", by_day([False, True], [True]))
def test_two_levels(distributed: bool) -> None:
    """4 ranks as 2 nodes: replicas are equal, and the loss follows the native one."""
    block = {"dp": DP, "min_bytes": 0, "hierarchy": 2}
    job = Job(steps=8, distributed_optimizer=distributed, overlap=distributed)
    native, levels = outcomes(4, [job, replace(job, block=block)])
    assert all(rank.parameters == levels[0].parameters for rank in levels)
    ends = [sum(sum(rank.losses[-3:]) for rank in side) for side in (native, levels)]
    assert abs(ends[1] - ends[0]) < 0.03 * ends[0], ends
    assert levels[0].residuals > 0
    for rank in levels:
        messages, left, _, _ = rank.ledger["dp", "forward"]
        assert left == 0 < messages


def test_guard_and_ramp() -> None:
    """All ranks change at the same step: nothing hangs, and a fallback stays native."""
    ramp = {"dp": {**DP, "ramp": {"from": 8, "steps": 6}}, "min_bytes": 0}
    found = outcomes(
        2,
        [
            Job(steps=8, block={"dp": WRONG, **EVERY}),
            Job(steps=8, distributed_optimizer=True, block={"dp": WRONG, **EVERY}),
            Job(steps=8, pp=2, block={"pp": WRONG, **EVERY}),
            Job(steps=8, block=ramp),
        ],
    )
    for job, dimension in zip(found, ("dp", "dp", "pp", "dp"), strict=True):
        for rank in job:
            counted = [found for (name, _), found in rank.ledger.items() if name == dimension]
            assert counted
            for messages, left, _, _ in counted:
                expected = 0 if job is found[3] else messages * 7 / 8  # the first step was sampled
                assert left == expected, (dimension, messages, left)
        if dimension == "dp":
            assert job[0].parameters == job[1].parameters
        losses = max((rank.losses for rank in job), key=len)
        assert losses[-1] < losses[0]
