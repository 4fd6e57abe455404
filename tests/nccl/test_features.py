"""ZeRO over NCCL with features that other tests here omit: low-bit residuals, islands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("deepspeed")

from tests.nccl.common import DEVICE, EIGHT_BITS, FEEDBACK, MARKS, Trainings, trainings
from tests.nccl.pool import NcclPool
from tests.sync import test_deepspeed as islands
from tests.training.trainer import Job, run

pytestmark = MARKS

STEPS = 5
BF16 = Job(1, "bf16", steps=STEPS)
FP32 = Job(1, steps=STEPS)
FP16 = Job(2, "fp16", steps=STEPS, nan_step=2)
#: job, block, the dimension that is encoded
LOSSY: dict[str, tuple[Job, dict[str, Any], str]] = {
    "residuals of 4 bits": (FP32, {"dp": {**FEEDBACK, "error_feedback": {"bits": 4}}}, "dp"),
    "residuals of 8 bits": (
        replace(BF16, stage=2), {"dp": {**FEEDBACK, "error_feedback": {"bits": 8}}}, "dp",
    ),
    "residuals of 16 bits": (
        replace(BF16, stage=3), {"dp": {**FEEDBACK, "error_feedback": {"bits": 16}}}, "dp",
    ),
    "gaussian": (BF16, {"dp": {"codec": "blockint", "bits": 4, "levels": "gaussian"}}, "dp"),
    "low rank": (FP32, {"dp": {"codec": "powersgd", "rank": 8}}, "dp"),
    "a step that overflows": (FP16, {"dp": FEEDBACK, "zero": EIGHT_BITS}, "dp"),
}  # fmt: skip


train = trainings(run, 2)


@pytest.mark.parametrize("stage", [1, 2])
def test_exact_steps_are_identical(train: Trainings, stage: int) -> None:
    """The gather of a step sends lossless deltas, in fewer bytes."""
    job = replace(BF16, stage=stage)
    base = train(job)
    found = train(replace(job, block={"zero": {"codec": "stepcode"}, "min_bytes": 0}))
    for mine, theirs in zip(base, found, strict=True):
        assert theirs.losses == mine.losses and theirs.digests == mine.digests
        _, _, raw, wire = theirs.ledger["zero"]
        assert wire < 0.9 * raw


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_ones_are_close(train: Trainings, name: str) -> None:
    job, block, dimension = LOSSY[name]
    base, found = train(job), train(replace(job, block={**block, "min_bytes": 0}))
    for mine, theirs in zip(base, found, strict=True):
        assert theirs.skipped == mine.skipped
        assert theirs.losses != mine.losses
        seen = [pair for pair in zip(theirs.losses, mine.losses, strict=True) if pair == pair]
        assert all(one == pytest.approx(other, rel=0.2, nan_ok=True) for one, other in seen)
        _, _, raw, wire = theirs.ledger[dimension]
        assert wire < raw
    assert found[0].digests == found[1].digests


def test_auto_compares_steps_and_goes_on(train: Trainings) -> None:
    """Trials, compared steps and a decision, all lossless and thus invisible."""
    job = replace(BF16, steps=24)
    auto = {"codec": "expcode", "when": "auto"}
    found = train(replace(job, block={"dp": auto, "zero": auto, "min_bytes": 0}))
    for mine, theirs in zip(train(job), found, strict=True):
        assert theirs.losses == mine.losses and theirs.digests == mine.digests
        messages, native, *_ = theirs.ledger["dp"]
        assert 0 < native <= messages


@pytest.mark.parametrize("stage", [1, 3])
def test_islands_that_meet_every_step_are_one_job(stage: int) -> None:
    jobs = [Job(stage, accumulation=2), Job(stage, "bf16")]
    with NcclPool(4, device=DEVICE) as pool:
        pool.run(islands.every_step, jobs, timeout=240)
