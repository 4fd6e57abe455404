"""Secondary shards under FSDP2: training as native, and bytes between two nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hybridcomp
from hybridcomp.errors import ConfigError
from tests.patches.torch.trainer import Job, Model, build, digest, train
from tests.ranks import RunRanks
from tests.selection import by_day

#: two nodes of two ranks
EXACT: dict[str, Any] = {"zero": {"secondary": "exact"}, "hierarchy": 2, "min_bytes": 0}
BITS = {**EXACT, "zero": {"secondary": {"bits": 8}}}
STEPS = 5
JOB = Job(bf16=True, reduce_dtype="float32", steps=STEPS, lr=1e-4)
JOBS = {
    "resharded": JOB,
    "kept for the backward pass": replace(JOB, reshard=False),
    "resharded to two": replace(JOB, reshard=2),
    "accumulation": replace(JOB, micro_batches=2),
    "groups of two modules": replace(JOB, list_group=True),
}
DAY = ("accumulation",)


def outcome(job: Job, disturb: str = "") -> tuple[list[float], str, list[int], int]:
    """Return losses, this rank's parameters, and bytes between nodes by step, also of copies."""
    model = build(job)
    attached = hybridcomp.attach(model, job.block) if job.block is not None else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr)
    losses: list[float] = []
    sent: list[int] = []
    held = 0
    for step in range(job.steps):
        if step == 3 and disturb == "loaded":
            state = {name: value * 1.5 for name, value in model.state_dict().items()}
            model.load_state_dict(state)
        if step == 3 and disturb == "resync" and attached is not None and dist.get_rank() == 1:
            attached.channels.resync()
        if step == 3 and disturb == "written" and attached is not None and dist.get_rank() == 2:
            gathers(model)[0]._copies.kept.slice.view(-1)[3] = 1.0
        losses += train(job, model, optimizer, step, step + 1)
        if attached is not None:
            entry = attached.channels.ledger.interval["zero", "forward"]
            sent.append(int(entry.inter_nbytes) - sum(sent))
            held = sum(one._copies.kept.slice.nbytes for one in gathers(model))
    if attached is not None:
        attached.detach()
    return losses, digest(model), sent, held


def gathers(model: Any) -> list[Any]:
    from hybridcomp.patches.torch.fsdp2.fsdp2 import groups_of

    return [group._all_gather_comm for group in groups_of(model)]


@pytest.mark.parametrize("name", by_day(JOBS, DAY))
def test_trains_as_natively(module_ranks: RunRanks, name: str) -> None:
    job = JOBS[name]
    native = module_ranks(4, outcome, job)
    exact = module_ranks(4, outcome, replace(job, block=EXACT))
    assert [found[:2] for found in exact] == [found[:2] for found in native]
    numel = sum(p.numel() for p in Model().parameters())
    for _, _, sent, held in exact:
        assert 0 < max(sent[1:]) < 0.5 * sent[0], "the first gather sends all"
        assert held < 1.3 * 2 * numel / 2, "half of bf16 parameters, rows of the last rank padded"


def test_eight_bits_take_half_the_memory(module_ranks: RunRanks) -> None:
    native, exact, bits = (
        module_ranks(4, outcome, replace(JOB, block=block)) for block in (None, EXACT, BITS)
    )
    for plain, whole, eight in zip(native, exact, bits, strict=True):
        assert whole[:2] == plain[:2]
        assert eight[3] < 0.65 * whole[3]  # vectors stay whole, and payloads are multiples of 16
        assert eight[0] != plain[0] and eight[0] == pytest.approx(plain[0], rel=0.02)
        assert sum(eight[2][1:]) < sum(whole[2][1:]) * 1.2


@pytest.mark.parametrize("way", by_day(["loaded", "resync", "written"], ["written"]))
def test_changes_from_outside_are_noticed(module_ranks: RunRanks, way: str) -> None:
    native = module_ranks(4, outcome, JOB, way)
    exact = module_ranks(4, outcome, replace(JOB, block=EXACT), way)
    assert [found[:2] for found in exact] == [found[:2] for found in native]
    for _, _, sent, _ in exact:
        assert sent[3] > 1.3 * sent[2] and sent[4] < 1.3 * sent[2]


def refused(job: Job) -> str:
    with pytest.raises(ConfigError) as caught:
        hybridcomp.attach(build(job), job.block)
    return str(caught.value)


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (replace(JOB, block=EXACT, replicas=2), "with an HSDP mesh; it shards inside of a node"),
        (replace(JOB, block=EXACT, bf16=False), "with fp32 parameters; steps are those of bf16"),
        (replace(JOB, block={**EXACT, "hierarchy": 4}), "found 1 nodes of 4 ranks"),
        (replace(JOB, block={**EXACT, "hierarchy": 1}), "found 4 nodes of 1 ranks"),
        (replace(JOB, engine="ddp", block=EXACT), "DistributedDataParallel"),
    ],
)
def test_where_no_copies_can_be(module_ranks: RunRanks, job: Job, said: str) -> None:
    found = set(module_ranks(4, refused, job))
    assert len(found) == 1
    assert said in found.pop()
