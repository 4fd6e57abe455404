"""AutoTP, Ulysses and DeepSpeed's MoE over NCCL."""

from __future__ import annotations

import pytest

pytest.importorskip("deepspeed")

from tests.nccl.common import EIGHT_BITS, MARKS, STEPS, Trainings, assert_follows, block, trainings
from tests.training import moe_trainer, split_trainer

pytestmark = MARKS

SPLIT = {
    "autotp": split_trainer.Job(tp=2, stage=1, bf16=True, steps=STEPS),
    "autotp overlap": split_trainer.Job(tp=2, overlap=True, bf16=True, steps=STEPS),
    "ulysses": split_trainer.Job(sp=2, stage=1, bf16=True, steps=STEPS),
    "alst": split_trainer.Job(sp=2, alst=True, bf16=True, steps=STEPS),
}
MOE = {f"moe zero{zero}": moe_trainer.Job(zero=zero, bf16=True, steps=STEPS) for zero in (0, 1)}


train = trainings(split_trainer.run, 2)
experts = trainings(moe_trainer.run, 2)


def dimension(name: str) -> str:
    return "tp" if "autotp" in name else "cp"


@pytest.mark.parametrize("codec", ["none", "expcode"])
@pytest.mark.parametrize("name", SPLIT)
def test_identity(train: Trainings, name: str, codec: str) -> None:
    job = SPLIT[name]
    base, found = train.both(job, block(dimension(name), codec))
    for mine, theirs in zip(base, found, strict=True):
        assert theirs.losses == mine.losses
        assert theirs.digests == mine.digests
        for way in ("forward", "backward"):
            messages, native, _, wire = theirs.ledger[dimension(name), way]
            assert native == (messages if codec == "none" else 0) and messages > 0 and wire > 0


@pytest.mark.parametrize("name", SPLIT)
def test_eight_bits_follow_the_baseline(train: Trainings, name: str) -> None:
    job = SPLIT[name]
    base, found = train.both(job, block(dimension(name), EIGHT_BITS))
    assert_follows(base, found)


@pytest.mark.parametrize("codec", ["none", "expcode"])
@pytest.mark.parametrize("name", MOE)
def test_experts_identity(experts: Trainings, name: str, codec: str) -> None:
    job = MOE[name]
    base, found = experts.both(job, block("ep", codec))
    for mine, theirs in zip(base, found, strict=True):
        assert theirs.losses == mine.losses
        assert theirs.parameters == mine.parameters
        assert any(row[0] == "ep" and row[4] for row in theirs.messages)


@pytest.mark.parametrize("name", MOE)
def test_experts_in_eight_bits(experts: Trainings, name: str) -> None:
    job = MOE[name]
    base, found = experts.both(job, block("ep", EIGHT_BITS))
    assert_follows(base, found)
