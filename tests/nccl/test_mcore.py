"""megatron-core over NCCL: tensor, pipeline, expert and data parallel, and three on eight ranks."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("megatron") is None or find_spec("megatron.core") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

from dataclasses import replace

from tests.nccl.common import (
    DEVICE,
    EIGHT_BITS,
    FEEDBACK,
    MARKS,
    STEPS,
    Trainings,
    assert_follows,
    block,
    trainings,
)
from tests.training.mcore_trainer import Job, run

pytestmark = MARKS

#: job, its dimensions
JOBS: dict[str, tuple[Job, str]] = {
    "TP2": (Job(tp=2), "tp"),
    "TP2 SP": (Job(tp=2, sequence_parallel=True), "tp"),
    "PP2": (Job(pp=2), "pp"),
    "PP2 interleaved": (Job(layers=4, pp=2, virtual=2, batch_p2p=False, overlap=True), "pp"),
    "EP2": (Job(experts=2, ep=2), "ep dp"),
    "DP2": (Job(), "dp"),
    "DP2 distributed optimizer": (
        Job(distributed_optimizer=True, overlap=True, average=True), "dp zero",
    ),
}  # fmt: skip
JOBS = {name: (replace(job, bf16=True, steps=STEPS), dims) for name, (job, dims) in JOBS.items()}
THREE = Job(tp=2, pp=2, distributed_optimizer=True, bf16=True, steps=STEPS)


train = trainings(run, 2)
eight = trainings(run, 8)


def check_identity(base: list[Any], found: list[Any], dimensions: str) -> None:
    assert len(base[-1].losses) == STEPS
    for mine, theirs in zip(base, found, strict=True):
        assert theirs.losses == mine.losses
        assert theirs.parameters == mine.parameters
        assert {dimension for dimension, _ in theirs.ledger} == set(dimensions.split())


def lossless(job: Job, dimensions: str) -> Job:
    """Return ``job`` with lossless codecs; upstream's pipelines take only fixed sizes over NCCL."""
    pipeline = "pp" in dimensions
    codec = EIGHT_BITS if pipeline else "expcode"
    return replace(job, block=block(dimensions, codec), raw=pipeline)


@pytest.mark.parametrize("name", JOBS)
def test_none_is_identical(train: Trainings, name: str) -> None:
    job, dimensions = JOBS[name]
    check_identity(*train.both(job, block(dimensions, "none")), dimensions)


@pytest.mark.parametrize("name", JOBS)
def test_lossless_is_identical(train: Trainings, name: str) -> None:
    job, dimensions = JOBS[name]
    check_identity(train(job), train(lossless(job, dimensions)), dimensions)


@pytest.mark.skipif(DEVICE == "cpu", reason="gloo delivers messages that are shorter than expected")
def test_sizes_that_vary_are_refused_in_pipelines(train: Trainings) -> None:
    job = replace(JOBS["PP2"][0], steps=1, block=block("pp", "expcode"))
    with pytest.raises(AssertionError, match="ConfigError.*size varies"):
        train(job)


@pytest.mark.parametrize("name", JOBS)
def test_eight_bits_follow_the_baseline(train: Trainings, name: str) -> None:
    job, dimensions = JOBS[name]
    base, found = train.both(job, block(dimensions, EIGHT_BITS))
    assert_follows(base, found)


def test_a_restart_goes_on_as_if_nothing_had_happened(train: Trainings, tmp_path: Path) -> None:
    whole = Job(bf16=True, steps=8, block={**block("dp", FEEDBACK), "start_step": 2})
    unbroken, resumed = train(whole), train(replace(whole, restart=4, folder=str(tmp_path)))
    for mine, theirs in zip(unbroken, resumed, strict=True):
        assert theirs.losses == mine.losses and theirs.parameters == mine.parameters
        assert theirs.residuals == mine.residuals > 0


@pytest.mark.parametrize("codec", ["none", "lossless"])
def test_three_dimensions_on_eight_ranks(eight: Trainings, codec: str) -> None:
    """Every group has two ranks, so the order of sums is fixed here too."""
    dimensions = "dp zero tp pp"
    none = replace(THREE, block=block(dimensions, "none"))
    found = eight(none if codec == "none" else lossless(THREE, dimensions))
    check_identity(eight(THREE), found, dimensions)
