"""ZeRO 0 to 3 and BF16_Optimizer over NCCL: exact where they must be, close elsewhere."""

from __future__ import annotations

import pytest

pytest.importorskip("deepspeed")

from tests.nccl.common import (
    EIGHT_BITS,
    FEEDBACK,
    MARKS,
    STEPS,
    Trainings,
    assert_follows,
    block,
    tail,
    trainings,
)
from tests.training.trainer import Job, run

pytestmark = MARKS

JOBS = {
    **{f"zero{stage}": Job(stage, "bf16", steps=STEPS) for stage in range(4)},
    "zero1 accumulation": Job(1, "bf16", steps=STEPS, accumulation=2),
    "zero2 overlap": Job(2, "bf16", steps=STEPS, zero={"overlap_comm": True}),
    "zero3 overlap": Job(3, "bf16", steps=STEPS, zero={"overlap_comm": True}),
    "bf16_optimizer": Job(1, "bf16", steps=STEPS, bf16_optimizer=True),
}
PRESETS = ("recommended", "naive-zfp", "naive-mpc", "zhybrid")


train = trainings(run, 2)


def dimensions(job: Job) -> str:
    return "dp zero" if job.stage else "dp"


@pytest.mark.parametrize("codec", ["none", "expcode", "mpc"])
@pytest.mark.parametrize("name", JOBS)
def test_identity(train: Trainings, name: str, codec: str) -> None:
    """With two ranks the order of a sum is fixed."""
    job = JOBS[name]
    base, found = train.both(job, block(dimensions(job), codec))
    assert len(base[0].losses) == STEPS and base[0].losses[-1] < base[0].losses[0]
    for mine, theirs in zip(base, found, strict=True):
        assert theirs.losses == mine.losses
        assert theirs.digests == mine.digests
        for dimension in dimensions(job).split():
            messages, native, raw, wire = theirs.ledger[dimension]
            # stage 3 sends a parameter's first fetch exactly
            assert native == messages > 0 if codec == "none" else native < messages
            assert (wire == raw > 0) if codec == "none" else wire > 0


@pytest.mark.parametrize("name", JOBS)
def test_lossy_runs_follow_the_baseline(train: Trainings, name: str) -> None:
    job = JOBS[name]
    settings = {**block("dp", FEEDBACK), **(block("zero", EIGHT_BITS) if job.stage else {})}
    base, found = train.both(job, settings)
    assert found[0].digests == found[1].digests
    assert_follows(base, found)
    _, native, raw, wire = found[0].ledger["dp"]
    assert native == 0 and raw > 3.3 * wire
    assert found[0].residual > 0


@pytest.mark.parametrize("preset", PRESETS)
def test_presets(train: Trainings, preset: str) -> None:
    job = JOBS["zero1"]
    settings = {"preset": preset, "when": "always", "min_bytes": 0, "on_unsupported": "native"}
    base, found = train.both(job, settings)
    assert found[0].digests == found[1].digests
    assert tail(found) == pytest.approx(tail(base), rel=0.05)
    if preset == "naive-mpc":
        assert found[0].losses == base[0].losses


def test_bounds(train: Trainings) -> None:
    """Sizes of radix vary and stay on the device."""
    job = JOBS["zero1"]
    bounds = {"dp": {"error_bound": 0.02}, "zero": {"error_bound": 0.01}, "min_bytes": 0}
    base, found = train.both(job, bounds)
    assert found[0].digests == found[1].digests
    assert_follows(base, found)


def test_deltas(train: Trainings) -> None:
    """Parameters travel as deltas; the first gather is exact."""
    job = JOBS["zero1"]
    delta = {"zero": {"codec": "blockint", "bits": 4, "delta": True}, "min_bytes": 0}
    base, found = train.both(job, delta)
    assert found[0].digests == found[1].digests
    assert found[0].losses[:2] == base[0].losses[:2]
    assert_follows(base, found)


def test_a_nan_is_seen_where_natively(train: Trainings) -> None:
    """All ranks skip the step, as they do without hybridcomp."""
    job = Job(1, "bf16", steps=6, nan_step=2)
    settings = {**block("dp", FEEDBACK), **block("zero", EIGHT_BITS)}
    for mine, theirs in zip(*train.both(job, settings), strict=True):
        assert theirs.skipped == mine.skipped == [step == 2 for step in range(6)]
