"""ZeRO-Offload with encoded copies between device and host, which share memory on a CPU."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import RankPool, Trained
from tests.selection import by_day

if find_spec("deepspeed") is None:  # importing it here would take longer than the tests
    pytest.skip("needs deepspeed", allow_module_level=True)

from hybridcomp.tools.plan.cost.copies import Whole, gradient_nbytes, whole_of
from tests.training.in_turn import start_deepspeed
from tests.training.trainer import Job, Outcome, Tiny, final_loss, make_engine, run, train_step

NIGHTLY = os.environ.get("HYBRIDCOMP_NIGHTLY") == "1"
FORWARD, BACKWARD = "offload.forward", "offload.backward"
BLOCKINT = {"codec": "blockint", "bits": 8}
#: bits per value in the largest messages, including scales and padding
BITS = 8.6


def offloading(stage: int, dtype: str = "bf16", **more: Any) -> Job:
    """Return a job with a host optimizer: torch's Adam or DeepSpeed's."""
    zero = {"offload_optimizer": {"device": "cpu", "pin_memory": False}, **more.pop("zero", {})}
    ds_json = {"zero_force_ds_cpu_optimizer": False, **more.pop("ds_json", {})}
    return Job(stage, dtype, zero=zero, ds_json=ds_json, **more)


def with_block(job: Job, offload: Any, **more: Any) -> Job:
    return replace(job, block={"offload": offload, "min_bytes": 0, **more})


KINDS = {f"zero{stage}-{dtype}": offloading(stage, dtype)
         for stage in (1, 2, 3) for dtype in ("fp32", "bf16")}  # fmt: skip
SHORT = 6
#: steps of tests with several micro-batches each, or of bit-identity
FEW = 2
#: trained for 50 steps: nightly all
LONG = [kind for kind in KINDS if NIGHTLY]
KINDS = {name: job if name in LONG else replace(job, steps=SHORT) for name, job in KINDS.items()}
VARIANTS = {
    **{f"accumulation-zero{stage}-{dtype}": offloading(  # every step clips
           stage, dtype, accumulation=3, ds_json={"gradient_clipping": 0.05})
       for stage in (1, 2, 3) for dtype in ("fp32", "bf16")},
    **{f"accumulation_fp32-zero{stage}": offloading(
           stage, accumulation=2, ds_json={"data_types": {"grad_accum_dtype": "fp32"}})
       for stage in (1, 2, 3)},
    "round_robin-zero2": offloading(2, zero={"round_robin_gradients": True}),
    "overlap-zero2": offloading(2, zero={"overlap_comm": True}),
    "sub_groups-zero3": offloading(3, zero={"sub_group_size": 1500}),
    **{f"fp16-zero{stage}": offloading(
           stage, "fp16", accumulation=2, ds_json={"fp16": {"enabled": True, "loss_scale": 64}})
       for stage in (1, 2, 3)},
}  # fmt: skip

#: variant, and where micro-batches are added up
CASES = [
    *((name, "device") for name in (*KINDS, *VARIANTS)),
    *((name, "host") for name, job in VARIANTS.items() if job.accumulation > 1),
]
DAY = [
    ("zero2-fp32", "device"), ("zero3-bf16", "device"), ("accumulation-zero1-bf16", "device"),
    ("accumulation-zero2-bf16", "device"), ("accumulation-zero3-bf16", "host"),
    ("sub_groups-zero3", "device"), ("fp16-zero2", "device"),
]  # fmt: skip

#: native bytes per gradient value in a plan, by ZeRO stage, of 1 to 3 micro-batches
PLANNED = {1: (4.0, 4.0, 4.0), 2: (4.0, 13.04, 19.07), 3: (8.0, 12.0, 16.0)}


@pytest.fixture(scope="module")
def train() -> Iterator[Trained]:
    """Return a job's results on two ranks."""
    with Trained(2, run) as trained:
        yield trained


def assert_same(base: list[Outcome], other: list[Outcome]) -> None:
    for mine, theirs in zip(base, other, strict=True):
        assert theirs.losses == mine.losses
        assert theirs.digests == mine.digests
        assert theirs.skipped == mine.skipped


@pytest.mark.parametrize(("name", "sums"), by_day(CASES, DAY))
def test_none_and_lossless_are_bit_identical(train: Trained, name: str, sums: str) -> None:
    """Micro-batches accumulated on device or host, other layouts and dtypes: the same bits."""
    job = KINDS[name] if name in KINDS else replace(VARIANTS[name], steps=FEW)
    base, none = train(job), train(with_block(job, "none"))
    codec = "expcode" if name in KINDS else "mpc"
    lossless = train(with_block(job, {"codec": codec, "sums": sums}))
    assert_same(base, none)
    assert_same(base, lossless)
    if name in LONG:
        assert len(base[0].losses) == 50 and final_loss(base) < 0.5 * base[0].losses[0]
    for plain, coded in zip(none, lossless, strict=True):
        for way in (FORWARD, BACKWARD):
            messages, native, raw, wire = plain.ledger[way]
            assert messages == native > 0 and raw == wire > 0
            assert coded.ledger[way][1:3] == (0, raw) and coded.ledger[way][3] > 0


@pytest.mark.parametrize(
    "stage, accumulation", by_day([*product((1, 2, 3), (1, 3)), (2, 2)], [(2, 2), (3, 1)])
)
def test_bytes_are_those_that_a_plan_counts(train: Trained, stage: int, accumulation: int) -> None:
    """Natively, and encoded with device sums, where each gradient crosses once a step."""
    job = offloading(stage, accumulation=accumulation, steps=2)
    sizes = tuple(float(one.numel()) for one in Tiny().parameters())
    values, whole = sum(sizes), whole_of([(sizes, 2)]) if stage == 2 else Whole()
    # upstream sums whole parameters, and the largest is split between two ranks
    planned = sum(gradient_nbytes(stage, 2, accumulation, whole.mean))
    assert planned == pytest.approx(PLANNED[stage][accumulation - 1], abs=0.01)
    for block in ("none", {**BLOCKINT, "sums": "device"}):
        outcomes = train(with_block(job, block))
        for way, native in ((BACKWARD, planned), (FORWARD, 2)):
            raw, wire = (sum(one.ledger[way][place] for one in outcomes) for place in (2, 3))
            assert 1 - 1e-9 <= raw / job.steps / values / native < 1.03
            sent = native if block == "none" else BITS / 8
            assert 0.9 < wire / job.steps / values / sent < 1.03
        most = gradient_nbytes(stage, 2, accumulation, whole.most)
        busiest = max(one.ledger[BACKWARD][2] for one in outcomes)
        assert 1 - 1e-3 <= busiest / job.steps / (values / 2) / sum(most) < 1.03


def half_on_device(jobs: list[Job]) -> list[Outcome]:
    """Return results of jobs whose first sub-groups step on a fake device, cpu:0."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import stage3

    before = stage3.DeepSpeedCPUAdam, get_accelerator()._name
    stage3.DeepSpeedCPUAdam, get_accelerator()._name = torch.optim.AdamW, "cpu:0"
    try:
        return run(jobs)
    finally:
        stage3.DeepSpeedCPUAdam, get_accelerator()._name = before


@pytest.mark.nightly
@pytest.mark.parametrize("accumulation", [1, 2])
def test_sub_groups_on_the_device_are_left_to_upstream(train: Trained, accumulation: int) -> None:
    """With ``ratio`` below 1 the others are encoded, with the same bits."""
    kept = {"device": "cpu", "pin_memory": False, "ratio": 0.5}
    job = offloading(3, accumulation=accumulation, steps=FEW,
                     zero={"sub_group_size": 500, "offload_optimizer": kept})  # fmt: skip
    blocks = ("none", {"codec": "mpc", "sums": "device"}, {"codec": "mpc", "sums": "host"})
    jobs = [job, *(with_block(job, one) for one in blocks), with_block(job, BLOCKINT)]
    for base, none, *lossless, lossy in train.pool.run(half_on_device, jobs):
        for other in (none, *lossless):
            assert_same([base], [other])
        assert lossy.losses != base.losses
        assert lossy.losses == pytest.approx(base.losses, rel=0.03)
        for coded in (*lossless, lossy):
            messages, native, raw, wire = coded.ledger[BACKWARD]
            assert 0 < native < messages and wire < raw == none.ledger[BACKWARD][2]
            messages, native, raw, wire = coded.ledger[FORWARD]
            assert messages > native == 0 and wire < raw == none.ledger[FORWARD][2]
        whole = sum(one.numel() for one in Tiny().parameters())
        assert none.ledger[FORWARD][2] < 0.7 * FEW * whole  # bf16, of one of two ranks


@pytest.mark.parametrize("stage", by_day([2, 3], [3]))
def test_sums_cross_once_or_packed(train: Trained, stage: int) -> None:
    """Six micro-batches, more than fit one pass: device and host both train well.

    Stage 1 has no choice: it reduces once a step.
    """
    job = offloading(stage, accumulation=6, steps=FEW)
    base = train(job)
    device = train(with_block(job, {**BLOCKINT, "sums": "device"}))
    host = train(with_block(job, {**BLOCKINT, "sums": "host"}))
    for lossy in (device, host):
        assert lossy[0].losses != base[0].losses
        assert lossy[0].losses == pytest.approx(base[0].losses, rel=0.03)
        assert lossy[0].digests == lossy[1].digests
    assert host[0].losses != device[0].losses
    once, each = device[0].ledger[BACKWARD], host[0].ledger[BACKWARD]
    none = train(with_block(job, "none"))[0].ledger[BACKWARD]
    assert once[:3] == each[:3] == (none[0], 0, once[2])
    assert each[3] == 6 * once[3]


@pytest.mark.parametrize("stage", by_day([2, 3], [2]))
def test_small_gradients_stay_with_the_others(train: Trained, stage: int) -> None:
    """Even without a codec they are accumulated on the device, bit for bit."""
    job = offloading(stage, accumulation=3, steps=FEW)
    base = train(job)
    exact = train(with_block(job, {"codec": "mpc", "sums": "device"}, min_bytes=1000))
    assert_same(base, exact)
    messages, native, raw, wire = exact[0].ledger[BACKWARD]
    assert 0 < native < messages / 3 and wire < raw / 2


@pytest.mark.parametrize(
    ("stage", "sums"),
    by_day(list(product((1, 2, 3), ("device", "host"))), [(2, "host"), (3, "device")]),
)
def test_a_nan_in_one_micro_batch_stays_visible(train: Trained, stage: int, sums: str) -> None:
    job = offloading(stage, accumulation=2, steps=4, nan_step=2)
    coded = train(with_block(job, {**BLOCKINT, "sums": sums}))
    for mine, theirs in zip(train(job), coded, strict=True):
        assert [math.isnan(loss) for loss in theirs.losses] == [
            math.isnan(loss) for loss in mine.losses
        ]
        assert theirs.skipped == mine.skipped


@pytest.mark.parametrize("stage", by_day([2, 3], [2]))
def test_auto_is_exact(train: Trained, stage: int) -> None:
    """Take turns with all variants, decide, and train some steps after the decision."""
    job = offloading(stage, accumulation=2, steps=2 + 2 * 3 * 4 + 4)
    assert_same(train(job), train(with_block(job, {"codec": "mpc", "when": "auto"})))


@pytest.mark.nightly
@pytest.mark.parametrize(("stage", "at"), [*product((2, 3), (9, 27))], ids=str)
def test_auto_goes_on(train: Trained, stage: int, at: int, tmp_path: Path) -> None:
    """Resumed before or after the decision: in turns as in the unbroken run, or by it."""
    lossy = with_block(
        offloading(stage, accumulation=2), {"codec": "blockint", "bits": 4, "when": "auto"}
    )
    for whole, resumed, kept in train.pool.run(broken_auto, lossy, str(tmp_path), at):
        assert kept == (at > 26)
        assert resumed == whole


class _Late(torch.nn.Module):
    """Two matrices; a step may give the second no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 64, bias=False)
        self.second = torch.nn.Linear(64, 64, bias=False)

    def forward(self, values: torch.Tensor, both: bool) -> torch.Tensor:
        found: torch.Tensor = self.first(values)
        return self.second(found) if both else found


def overflows_without_gradients() -> list[tuple[bool, int | None]]:
    """Return (overflow, first measured step) of each step; rank 1 has no gradient before one."""
    import deepspeed

    import hybridcomp
    from hybridcomp.channels import channels_of

    start_deepspeed()
    hybridcomp.install()
    model = _Late()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "fp16": {"enabled": True, "initial_scale_power": 32, "hysteresis": 1},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1000,
        "compression": {"offload": {"codec": "blockint", "bits": 8, "when": "auto"}},
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    channels, found = channels_of(engine), []
    assert channels is not None
    for step in range(4):
        loss = engine(torch.ones(4, 64).half(), step > 1).float().square().mean()
        engine.backward(loss)
        engine.step()
        found.append((bool(engine.optimizer.overflow), channels.pace.begin))
    engine.destroy()
    return found


def test_ranks_measure_the_same_steps_where_one_has_no_gradient(train: Trained) -> None:
    """Skipped steps return no parameter, and rank 1 copies nothing in the first two."""
    assert train.pool.run(overflows_without_gradients) == [[(True, 0)] * 4] * 2


def broken_auto(job: Job, folder: str, at: int) -> tuple[list[float], list[float], bool]:
    """Return losses after ``at`` steps without and with a restart, and if the decision was kept."""
    from hybridcomp.channels import channels_of

    engine = make_engine(job)
    for step in range(at):
        train_step(engine, job, step)
    engine.save_checkpoint(folder, tag="here")
    whole = [train_step(engine, job, step) for step in range(at, at + 12)]
    engine.destroy()
    again = make_engine(job)
    again.load_checkpoint(folder, tag="here")
    channels = channels_of(again)
    assert channels is not None
    kept = channels.host.pace.chosen is not None
    resumed = [train_step(again, job, step) for step in range(at, at + 12)]
    again.destroy()
    return whole, resumed, kept


def test_directions_differ(train: Trained) -> None:
    job = KINDS["zero2-fp32"]
    offload = {"codec": "blockint", "forward": "expcode", "backward": {"bits": 4}}
    outcome = train(with_block(job, offload))[0]
    _, _, raw, wire = outcome.ledger[BACKWARD]
    assert raw / wire > 6
    exact = train(with_block(job, {"codec": "none", "forward": "expcode"}))
    assert_same(train(job), exact)
    assert exact[0].ledger[BACKWARD][0] == exact[0].ledger[BACKWARD][1]


@pytest.mark.parametrize("stage", by_day([1, 3], [3]))
def test_beside_other_dimensions(train: Trained, stage: int) -> None:
    """The device's parameters are gathered encoded again; replicas stay equal."""
    block = {
        "dp": {"codec": "blockint", "bits": 4, "error_feedback": True},
        "zero": {"codec": "blockint", "bits": 8},
    }
    job = KINDS[f"zero{stage}-bf16"]
    lossy = train(with_block(job, BLOCKINT, **block))
    assert final_loss(lossy) == pytest.approx(final_loss(train(job)), rel=0.05)
    assert lossy[0].digests == lossy[1].digests
    lossless = train(with_block(replace(job, steps=SHORT), "mpc", dp="mpc", zero="mpc"))
    assert_same(train(replace(job, steps=SHORT)), lossless)


@pytest.mark.parametrize("stage", by_day([1, 2, 3], [3]))
def test_steps_before_start_step_stay_native(train: Trained, stage: int) -> None:
    job = replace(KINDS[f"zero{stage}-bf16"], steps=SHORT)
    late = train(with_block(job, {"codec": "blockint", "bits": 2}, start_step=3))[0]
    base = train(job)[0]
    assert late.losses[:4] == base.losses[:4]  # the fourth loss precedes the fourth step
    assert late.losses[4:] != base.losses[4:]
    for way in (FORWARD, BACKWARD):
        messages, native, *_ = late.ledger[way]
        assert native == messages // 2


@pytest.mark.nightly
@pytest.mark.parametrize(("stage", "accumulation"), list(product((1, 2, 3), (1, 2))))
def test_fp16_skips_the_same_steps(train: Trained, stage: int, accumulation: int) -> None:
    """Skip the first steps, whose loss scale is too large, and a step with a NaN on one rank."""
    fp16 = {"enabled": True, "initial_scale_power": 22, "hysteresis": 1, "loss_scale_window": 100}
    job = offloading(stage, "fp16", steps=14, nan_step=13, accumulation=accumulation,
                     ds_json={"fp16": fp16})  # fmt: skip
    base, coded = train(job), train(with_block(job, BLOCKINT))
    assert base[0].skipped[0] and not base[0].skipped[12] and base[0].skipped[13]
    for mine, theirs in zip(base, coded, strict=True):
        assert theirs.skipped == mine.skipped


def test_one_rank_is_enough() -> None:
    """There are no messages; the copies are still encoded."""
    jobs = []
    for stage in (2, 3):
        job = replace(KINDS[f"zero{stage}-bf16"], steps=SHORT)
        jobs += [job, with_block(job, BLOCKINT), with_block(job, "mpc")]
    with RankPool(1) as single:
        (found,) = single.run(run, jobs)
    for plain, lossy, lossless in (found[:3], found[3:]):
        assert_same([plain], [lossless])
        assert lossy.losses[-1] == pytest.approx(plain.losses[-1], rel=0.1)
        assert lossy.ledger[BACKWARD][2] > 3.5 * lossy.ledger[BACKWARD][3]


def whole_gradients(job: Job, names: list[str]) -> dict[str, Any]:
    """Return whole gradients before the first step, by DeepSpeed's reader."""
    from deepspeed.utils import safe_get_full_grad

    engine = make_engine(job)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(8, 24, generator=generator).to(torch.bfloat16)
    engine.backward(engine(values).float().square().mean())
    found = {name: safe_get_full_grad(engine.module.get_parameter(name)) for name in names}
    engine.step()
    engine.destroy()
    return {name: grad.float().cpu().tolist() for name, grad in found.items()}


@pytest.mark.parametrize("stage", by_day([2, 3], [3]))
def test_gradients_can_be_read_before_the_step(train: Trained, stage: int) -> None:
    job, names = offloading(stage), ["inner.weight", "middle.weight"]
    plain = train.pool.run(whole_gradients, job, names)
    coded = train.pool.run(whole_gradients, with_block(job, "mpc"), names)
    assert plain == coded
    assert any(any(map(any, grad)) for grad in plain[0].values())


def broken_run(job: Job, folder: str) -> tuple[list[float], list[float], float, float]:
    """Return losses after five steps without and with a restart; and the saved weights' error."""
    from deepspeed.utils import safe_get_full_fp32_param

    engine = make_engine(job)
    for step in range(5):
        train_step(engine, job, step)
    with torch.no_grad():
        held = [p.detach().clone() for p in engine.module.parameters()]
    engine.save_checkpoint(folder, tag="here")
    for before, after in zip(held, engine.module.parameters(), strict=True):
        assert torch.equal(before, after)
    engine.save_16bit_model(folder, "weights.pt")
    saved = torch.load(f"{folder}/weights.pt", weights_only=False)
    off = used = 0.0
    for name, weight in engine.module.named_parameters():
        master = safe_get_full_fp32_param(weight).to(saved[name].dtype)
        off = max(off, float((saved[name].view(-1) - master.view(-1)).float().abs().max()))
        if job.stage < 3:
            used = max(used, float((weight - master).float().abs().max()))
    whole = [train_step(engine, job, step) for step in range(5, 10)]
    engine.destroy()
    again = make_engine(job)
    path, _ = again.load_checkpoint(folder, tag="here")
    assert path is not None
    resumed = [train_step(again, job, step) for step in range(5, 10)]
    again.destroy()
    return whole, resumed, off, used


#: other encoded messages
BESIDE: dict[str, dict[str, Any]] = {
    "alone": {},
    "zero": {"zero": "blockint"},
    "delta": {"zero": {"codec": "blockint", "bits": 4, "delta": True}},  # refused at stage 3
}
SAVED = [case for case in product((1, 2, 3), BESIDE) if case != (3, "delta")]


@pytest.mark.parametrize(("stage", "beside"), by_day(SAVED, [(1, "delta"), (3, "zero")]))
def test_checkpoints_are_exact_and_resume(
    train: Trained, tmp_path: Path, stage: int, beside: str
) -> None:
    """Checkpoints hold the masters' values; a resumed run is bit-identical."""
    zero = {"stage3_gather_16bit_weights_on_model_save": True}
    job = offloading(stage, zero=zero)
    block = with_block(job, {"codec": "blockint", "bits": 4}, **BESIDE[beside])
    for whole, resumed, off, used in train.pool.run(broken_run, block, str(tmp_path)):
        assert resumed == whole
        assert off == 0.0
        assert used > 0.0 or stage == 3  # training uses decoded weights
        assert all(map(math.isfinite, whole))
