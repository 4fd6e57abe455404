"""FSDP2, HSDP and DDP over NCCL: exact if lossless, codecs, restarts, islands, versions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.nccl.common import DEVICE, EIGHT_BITS, MARKS, Trainings, trainings
from tests.nccl.pool import NcclPool
from tests.patches.torch import test_state
from tests.patches.torch.trainer import Job, Outcome, run_all
from tests.publishing import test_groups, test_torch
from tests.sync import test_torch as islands
from tests.sync.jobs import inside
from tests.sync.torch_job import Job as Islanders

pytestmark = MARKS

STEPS = 6
FSDP = Job(steps=STEPS)
DDP = replace(FSDP, engine="ddp")
JOBS: dict[str, Job] = {
    "FSDP2": FSDP,
    "FSDP2 bf16, sums fp32": replace(FSDP, bf16=True, reduce_dtype="float32"),
    "FSDP2 accumulates": replace(FSDP, micro_batches=2, reshard=True),
    "DDP": DDP,
    "DDP bf16": replace(DDP, bf16=True, micro_batches=2),
    "DDP unused": replace(DDP, unused=True),
}
#: gradient codecs that no other test here covers
GRADIENTS: dict[str, dict[str, Any]] = {
    "residuals of 4 bits": {"codec": "blockint", "bits": 4, "error_feedback": {"bits": 4}},
    "residuals of 8 bits": {"codec": "blockint", "bits": 4, "error_feedback": {"bits": 8}},
    "residuals of 16 bits": {"codec": "blockint", "bits": 4, "error_feedback": {"bits": 16}},
    "bound": {"codec": "radix", "error_bound": 0.01},
}


train = trainings(run_all, 2)


def with_codecs(job: Job, gradients: Any, gathers: Any) -> Job:
    """Return ``job`` with codecs on all its messages of any size."""
    zero = {"zero": gathers} if job.engine == "fsdp2" else {}
    return replace(job, block={"dp": gradients, **zero, "min_bytes": 0})


def assert_same(base: list[Outcome], found: list[Outcome]) -> None:
    for mine, theirs in zip(base, found, strict=True):
        assert theirs.losses == mine.losses and theirs.parameters == mine.parameters
        assert theirs.ledger and all(messages > 0 for messages, *_ in theirs.ledger.values())


def assert_close(base: list[Outcome], found: list[Outcome]) -> None:
    for mine, theirs in zip(base, found, strict=True):
        assert theirs.losses == pytest.approx(mine.losses, rel=0.1)
        assert theirs.losses != mine.losses
        _, native, raw, wire = theirs.ledger["dp"]
        assert native == 0 and wire < raw


@pytest.mark.parametrize("codec", ["none", "expcode"])
@pytest.mark.parametrize("name", JOBS)
def test_identity(train: Trainings, name: str, codec: str) -> None:
    job = JOBS[name]
    assert_same(train(job), train(with_codecs(job, codec, codec)))


@pytest.mark.parametrize("codec", GRADIENTS)
@pytest.mark.parametrize("name", ["FSDP2", "DDP"])
def test_codecs_of_gradients_are_close(train: Trainings, name: str, codec: str) -> None:
    job = JOBS[name]
    assert_close(train(job), train(with_codecs(job, GRADIENTS[codec], EIGHT_BITS)))


def test_replicas_of_shards() -> None:
    """Sums are native inside a shard group and encoded between replicas; each has two ranks."""
    job = replace(FSDP, replicas=2)
    trainings = Trainings(run_all, 4)
    try:
        base = trainings(job)
        assert_same(base, trainings(with_codecs(job, "expcode", "expcode")))
        lossy = trainings(with_codecs(job, GRADIENTS["residuals of 8 bits"], EIGHT_BITS))
        for mine, theirs in zip(base, lossy, strict=True):
            assert theirs.losses == pytest.approx(mine.losses, rel=0.1)
            assert theirs.residual > 0
    finally:
        trainings.close()


@pytest.mark.parametrize("name", ["FSDP2", "DDP"])
def test_resumed_is_unbroken(name: str, tmp_path: Path) -> None:
    """Low-bit residuals are saved with the engine's checkpoint, and as files."""
    job = test_state.FEW[name]
    with NcclPool(2, device=DEVICE) as pool:
        whole = pool.run(test_state.unbroken, job, tmp_path, timeout=240)
        for way in ("unnamed", "files"):
            again = pool.run(test_state.resumed, job, tmp_path, way, timeout=240)
            assert all(test_state.same(a, b) for a, b in zip(whole, again, strict=True)), way


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_islands_that_meet_every_step_are_one_job(engine: str) -> None:
    with NcclPool(4, device=DEVICE) as pool:
        pool.run(islands.every_step, engine, timeout=240)
        pool.run(islands.averaged_in_turn, engine, timeout=240)


def test_islands_meet_late_and_leave_one_out_that_diverges() -> None:
    with NcclPool(2, device=DEVICE) as pool:
        pool.run(islands.several, timeout=300)


def sparse() -> None:
    """Islands send few values and keep the rest for the next meeting; all end equal."""
    told = inside(
        preset="diloco", islands=1, every=2, codec="topk", density=0.25, error_feedback=True
    )
    job = Islanders(told).build()
    before = job.weights()
    after = job.train(6).weights()
    rows = [torch.empty_like(after) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, after)
    assert torch.equal(rows[0], rows[1]) and not torch.equal(before, after)
    assert bool(after.isfinite().all())
    row = job.meetings.row()
    assert row is not None and (row["meetings"], row["skipped"]) == (3.0, 0.0)


def test_islands_send_few_values() -> None:
    with NcclPool(2, device=DEVICE) as pool:
        pool.run(sparse, timeout=240)


def test_versions_go_over_a_group_and_through_a_folder(tmp_path: Path) -> None:
    with NcclPool(3, device=DEVICE) as pool:
        first, second, receiver = pool.run(test_groups.over_a_group, timeout=240)
        assert receiver == [(1, True), (2, False), "refused", None, (4, True)]
        assert first[3] == second[3] == "failed"
    with NcclPool(2, device=DEVICE) as pool:
        for job in (Job("ddp", bf16=True), Job("fsdp2", bf16=True)):
            folder = tmp_path / job.engine
            assert pool.run(test_torch.published, job, folder, timeout=240) == [[], []]
