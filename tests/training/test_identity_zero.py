"""ZeRO trainings: bit-identical with ``none`` and with a lossless codec, close with lossy ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

from tests.ranks import Trained
from tests.selection import by_day

if find_spec("deepspeed") is None:  # importing it here would take longer than the tests
    pytest.skip("needs deepspeed", allow_module_level=True)

from tests.training.trainer import Job, Outcome, final_loss, run

NIGHTLY = os.environ.get("HYBRIDCOMP_NIGHTLY") == "1"
DTYPES = ("fp32", "bf16")
FP16 = {"enabled": True, "loss_scale": 64}
KINDS = {
    **{f"zero{stage}-{dtype}": Job(stage, dtype) for stage in range(4) for dtype in DTYPES},
    "bf16_optimizer": Job(1, "bf16", bf16_optimizer=True),
}  # fmt: skip
SHORT = 6
if not NIGHTLY:
    KINDS = {name: replace(job, steps=SHORT) for name, job in KINDS.items()}
VARIANTS = {
    **{f"accumulation-zero{stage}": Job(stage, "bf16", accumulation=2) for stage in range(4)},
    "accumulation-bf16_optimizer": Job(1, "bf16", bf16_optimizer=True, accumulation=2),
    "accumulation_fp32-zero2": Job(2, "bf16", accumulation=2,
                                   ds_json={"data_types": {"grad_accum_dtype": "fp32"}}),
    "round_robin-zero1": Job(1, zero={"round_robin_gradients": True}),
    "round_robin-zero2": Job(2, zero={"round_robin_gradients": True}),
    "overlap-zero2": Job(2, zero={"overlap_comm": True}),
    "sequential-zero3": Job(3, zero={"stage3_allgather_sequential": True}),
    "prescale-zero0": Job(0, "bf16", ds_json={"prescale_gradients": True}),
    "predivide-zero0": Job(0, "bf16", ds_json={"gradient_predivide_factor": 4.0}),
    **{f"comm_fp32-zero{stage}": Job(stage, "bf16", ds_json={"communication_data_type": "fp32"})
       for stage in range(4)},
    **{f"comm_fp16-zero{stage}": Job(stage, ds_json={"communication_data_type": "fp16"})
       for stage in range(4)},
    "comm_fp32-bf16_optimizer": Job(1, "bf16", bf16_optimizer=True,
                                    ds_json={"communication_data_type": "fp32"}),
    **{f"fp16-zero{stage}": Job(stage, "fp16", ds_json={"fp16": FP16}) for stage in range(4)},
}  # fmt: skip
VARIANTS = {name: replace(job, steps=SHORT) for name, job in VARIANTS.items()}
#: each setting once, each stage at least twice
DAY = (
    "zero0-fp32", "zero1-bf16", "zero2-bf16", "zero3-bf16", "bf16_optimizer",
    "accumulation-zero1", "accumulation_fp32-zero2", "round_robin-zero2", "sequential-zero3",
    "prescale-zero0", "predivide-zero0", "comm_fp32-zero1", "fp16-zero3",
)  # fmt: skip


def block(job: Job, dp: Any, zero: Any) -> dict[str, Any]:
    """Return the block; stage 0 has no parameter gathers."""
    gathers = {"zero": zero} if job.stage else {}
    return {"dp": dp, "min_bytes": 0, **gathers}


@pytest.fixture(scope="module")
def train() -> Iterator[Trained]:
    """Return the results of a job on two ranks."""
    with Trained(2, run) as trained:
        yield trained


def assert_same(base: list[Outcome], other: list[Outcome]) -> None:
    for mine, theirs in zip(base, other, strict=True):
        assert theirs.losses == mine.losses
        assert theirs.digests == mine.digests
        assert theirs.skipped == mine.skipped


@pytest.mark.parametrize("kind", by_day(KINDS, ["zero0-fp32", "zero1-bf16", "zero3-bf16"]))
def test_none_is_bit_identical(train: Trained, kind: str) -> None:
    """With ``none`` everywhere every step equals the unpatched run bit for bit."""
    job = KINDS[kind]
    base, none = train(job), train(replace(job, block=block(job, "none", "none")))
    assert_same(base, none)
    if NIGHTLY:
        assert len(base[0].losses) == 50 and final_loss(base) < 0.5 * base[0].losses[0]
    for outcome in none:
        assert set(outcome.ledger) == ({"dp", "zero"} if job.stage else {"dp"})
        for messages, native, raw, wire in outcome.ledger.values():
            assert messages == native > 0 and raw == wire > 0


@pytest.mark.parametrize("name", by_day(KINDS | VARIANTS, DAY))
def test_lossless_is_bit_identical(train: Trained, name: str) -> None:
    """The same on the compressed path: owners, offsets, divisors and dtypes are right.

    It uses two ranks, as sums of two operands do not depend on their order.
    """
    job = (KINDS | VARIANTS)[name]
    lossless = train(replace(job, block=block(job, "mpc", "mpc")))
    assert_same(train(job), lossless)
    for outcome in lossless:
        messages, native, _, wire = outcome.ledger["dp"]
        assert messages > 0 and native == 0 and wire > 0
        if job.stage:  # persistent parameters of stage 3 are fetched natively
            messages, native, _, wire = outcome.ledger["zero"]
            assert messages > native and (native > 0) == (job.stage == 3)


@pytest.mark.parametrize("stage", by_day(range(3), [1]))
def test_sum_instead_of_average(train: Trained, stage: int) -> None:
    """``gradient_allreduce_op`` came with 0.19.8."""
    job = Job(stage, steps=SHORT, ds_json={"gradient_allreduce_op": "sum"})
    base = train(job)
    if base[0].losses == train(replace(job, ds_json={}))[0].losses:
        pytest.skip("this DeepSpeed does not know gradient_allreduce_op")
    assert_same(base, train(replace(job, block=block(job, "mpc", "mpc"))))


@pytest.mark.parametrize("bits", by_day([4, 8], [4]))
@pytest.mark.parametrize("kind", by_day(KINDS, ["zero1-bf16", "zero3-bf16"]))
def test_lossy_trains_as_well(train: Trained, kind: str, bits: int) -> None:
    job = KINDS[kind]
    dp = {"codec": "blockint", "bits": bits, "error_feedback": bits == 4}
    lossy = train(replace(job, block=block(job, dp, {"codec": "blockint", "bits": 8})))
    assert final_loss(lossy) == pytest.approx(final_loss(train(job)), rel=0.03)
    first, second = lossy
    assert first.digests == second.digests  # equal replicas
    assert first.losses != train(job)[0].losses  # it was compressed
    assert (first.residual > 0) == (bits == 4)
    native = train(replace(job, block=block(job, "none", "none")))
    least = 6.0 if kind in ("zero1-bf16", "zero2-bf16") else 3.5
    for coded, plain in zip(lossy, native, strict=True):
        _, _, raw, wire = coded.ledger["dp"]
        assert raw == plain.ledger["dp"][3]
        assert bits == 8 or raw / wire >= least


@pytest.mark.parametrize("stage", by_day(range(4), (3,)))
def test_fp16_skips_the_same_steps(train: Trained, stage: int) -> None:
    """Skip the first steps, whose loss scale is too large, and a step with a NaN on one rank.

    Stage 0 of DeepSpeed 0.19 does not scale the loss in ``engine.backward``.
    """
    fp16 = {"enabled": True, "initial_scale_power": 22, "hysteresis": 1, "loss_scale_window": 100}
    job = Job(stage, "fp16", steps=14, nan_step=13, ds_json={"fp16": fp16})
    base = train(job)
    assert base[0].skipped[0] == (stage > 0)
    assert not base[0].skipped[12] and base[0].skipped[13]
    dp = {"codec": "blockint", "bits": 4, "error_feedback": True}
    coded = train(replace(job, block=block(job, dp, {"codec": "blockint", "bits": 8})))
    for mine, theirs in zip(base, coded, strict=True):
        assert theirs.skipped == mine.skipped


@pytest.mark.parametrize("stage", by_day(range(4), [3]))
def test_start_step_is_native_before_and_compressed_after(train: Trained, stage: int) -> None:
    job = Job(stage, steps=SHORT)
    late = {**block(job, {"codec": "blockint", "bits": 2}, "none"), "start_step": 3}
    base, coded = train(job)[0], train(replace(job, block=late))[0]
    assert coded.losses[:4] == base.losses[:4]  # the fourth loss precedes the fourth reduction
    assert coded.losses[4:] != base.losses[4:]
    messages, native, *_ = coded.ledger["dp"]
    assert native == messages // 2


@pytest.fixture(scope="module")
def three() -> Iterator[Trained]:
    with Trained(3, run) as trained:
        yield trained


@pytest.mark.parametrize("stage", by_day(range(4), (3,)))
def test_three_ranks_lossless(three: Trained, stage: int) -> None:
    """Uneven owners; sums of three operands differ in the last bit only."""
    job = Job(stage, steps=SHORT)
    base, lossless = three(job), three(replace(job, block=block(job, "mpc", "mpc")))
    for mine, theirs in zip(base, lossless, strict=True):
        assert theirs.losses == pytest.approx(mine.losses, rel=1e-4)
