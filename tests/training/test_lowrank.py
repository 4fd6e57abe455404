"""Trainings with low-rank gradients: owners, divisors, overflows, replicas, bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

from tests.ranks import RankPool

if find_spec("deepspeed") is None:  # importing it here would take longer than the tests
    pytest.skip("needs deepspeed", allow_module_level=True)

from tests.selection import by_day
from tests.training.trainer import Job, Outcome, final_loss, run

Train = Callable[..., list[Outcome]]
SHORT = 6
KINDS = {
    "zero0": Job(0, steps=25),
    "zero1": Job(1, steps=25),
    "zero2-bf16": Job(2, "bf16", steps=25),
    "bf16_optimizer": Job(1, "bf16", bf16_optimizer=True, steps=25),
}


@pytest.fixture(scope="module")
def train() -> Iterator[Train]:
    """Return ``train(job, rank)`` on two ranks; without a rank nothing is compressed."""
    with RankPool(2) as pool:

        def once(job: Job, rank: int | None = None, **more: Any) -> list[Outcome]:
            dp = "none" if rank is None else {"codec": "powersgd", "rank": rank}
            job = replace(job, block={"dp": dp, "min_bytes": 0, **more})
            return [outcome for (outcome,) in pool.run(run, [job], timeout=280)]

        yield once


@pytest.mark.parametrize("kind", by_day(KINDS, ["zero0", "zero2-bf16"]))
def test_trains_and_saves_bytes(train: Train, kind: str) -> None:
    job = KINDS[kind]
    base, coded = train(job), train(job, 4)
    assert final_loss(coded) == pytest.approx(final_loss(base), rel=0.25)
    assert coded[0].losses != base[0].losses
    assert coded[0].digests == coded[1].digests  # equal replicas
    assert all(outcome.residual > 0 for outcome in coded)
    for outcome in coded:
        messages, native, raw, wire = outcome.ledger["dp"]
        assert native == 0 < messages and wire < 0.7 * raw


@pytest.mark.parametrize("stage", by_day([0, 1, 2], [2]))
def test_what_is_not_worth_factors_is_exact(train: Train, stage: int) -> None:
    """At a rank that saves nothing every sum equals native's: ranges and divisors are right."""
    job = Job(stage, steps=SHORT)
    base, exact = train(job), train(job, 50)
    assert exact[0].losses == base[0].losses
    assert exact[0].digests == base[0].digests
    assert exact[0].residual == 0


def test_an_overflow_is_skipped_and_forgotten(train: Train) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 100}
    job = Job(1, "fp16", steps=20, nan_step=15, ds_json={"fp16": fp16})
    base, coded = train(job), train(job, 2)
    assert coded[0].skipped == base[0].skipped and coded[0].skipped[15]
    assert all(loss == loss for number, loss in enumerate(coded[0].losses) if number != 15)
