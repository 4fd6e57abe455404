"""DeepSpeed's pipeline over NCCL, and its pipeline of megatron-core's layers on eight ranks."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

pytest.importorskip("deepspeed")

from tests.nccl.common import EIGHT_BITS, MARKS, STEPS, Trainings, assert_follows, block, trainings
from tests.training import pipe_trainer, tensor_trainer

pytestmark = MARKS

JOBS = {
    "pp2": pipe_trainer.Job(bf16=True, steps=STEPS),
    "pp2 zero1": pipe_trainer.Job(bf16=True, zero=1, steps=STEPS, checkpoint=True),
    "pp2 tied": pipe_trainer.Job(bf16=True, tied=True, steps=STEPS),
    "pp2 dynamic": pipe_trainer.Job(bf16=True, dynamic=True, steps=STEPS),
}


train = trainings(pipe_trainer.run, 2)


@pytest.mark.parametrize("codec", ["none", "expcode"])
@pytest.mark.parametrize("name", JOBS)
def test_identity(train: Trainings, name: str, codec: str) -> None:
    job = JOBS[name]
    base, found = train.both(job, block("pp", codec))
    for mine, theirs in zip(base, found, strict=True):
        assert theirs.losses == mine.losses
        assert theirs.parameters == mine.parameters
        rows = [row for row in theirs.messages if row[0] == "pp"]
        assert rows and all(messages > 0 and wire > 0 for _, _, messages, _, wire in rows)


@pytest.mark.parametrize("name", JOBS)
def test_eight_bits_follow_the_baseline(train: Trainings, name: str) -> None:
    job = JOBS[name]
    base, found = train.both(job, block("pp", EIGHT_BITS))
    assert_follows(base, found)
    rows = [row for one in found for row in one.messages if row[0] == "pp" and row[3]]
    least = 1.3 if job.dynamic else 1.6  # tiny messages, plus a header each if shapes change
    assert rows and all(raw > least * wire for *_, raw, wire in rows)


@pytest.fixture(scope="module")
def eight() -> Iterator[Trainings]:
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        pytest.skip("megatron-core is not installed")
    trainings = Trainings(tensor_trainer.run, 8)
    yield trainings
    trainings.close()


@pytest.mark.parametrize("codec", ["none", "expcode"])
def test_three_dimensions_on_eight_ranks(eight: Trainings, codec: str) -> None:
    """Every group has two ranks, so the order of sums is fixed here too."""
    job = tensor_trainer.Job(steps=STEPS, bf16=True)
    base, found = eight.both(job, block("dp zero tp pp", codec))
    for mine, theirs in zip(base, found, strict=True):
        assert theirs.losses == mine.losses
        assert theirs.parameters == mine.parameters
        assert {dimension for dimension, _ in theirs.ledger} == {"dp", "zero", "tp", "pp"}
