"""AutoTP and Ulysses: bit-identical with ``none`` and lossless, close with 8 bits, counted."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from packaging.version import Version

from tests.paths import CONFIGS

if find_spec("deepspeed") is None:  # importing it here would take longer than the tests
    pytest.skip("needs deepspeed", allow_module_level=True)

from hybridcomp.codecs import make_codec
from tests.ranks import RankPool, Trained
from tests.selection import by_day
from tests.training import split_parts, split_trainer
from tests.training.split_trainer import BATCH, LAYERS, LENGTH, VOCAB, WIDTH, Job, Outcome

LATER = Version(version("deepspeed")) >= Version("0.19.8")
SHORT = 4
NIGHTLY = os.environ.get("HYBRIDCOMP_NIGHTLY") == "1"
#: over 50 steps; by day few
LONG = {"tp": Job(tp=2), "cp": Job(sp=2), "cp-alst": Job(sp=2, alst=True)}
if not NIGHTLY:
    LONG = {name: replace(job, steps=SHORT) for name, job in LONG.items()}
VARIANTS = {
    **{f"tp-zero{stage}": Job(tp=2, stage=stage) for stage in (1, 2)},
    "tp-bf16": Job(tp=2, stage=1, bf16=True),
    "tp-overlap": Job(tp=2, overlap=True),
    "tp-checkpoint": Job(tp=2, checkpoint=True),
    "tp-accumulation": Job(tp=2, accumulation=2),
    **{f"cp-zero{stage}": Job(sp=2, stage=stage) for stage in (1, 2, 3)},
    "cp-bf16": Job(sp=2, stage=1, bf16=True),
    "cp-checkpoint": Job(sp=2, checkpoint=True),
    "cp-alst-checkpoint": Job(sp=2, alst=True, checkpoint=True),
}
if LATER:  # 0.19.0 gathers no logits, rejects ZeRO 3 with AutoTP, and keeps uneven heads
    VARIANTS["tp-head"] = Job(tp=2, head=True)
    VARIANTS["tp-zero3"] = Job(tp=2, stage=3)
    VARIANTS["cp-heads"] = Job(sp=2, heads=3)
VARIANTS = {name: replace(job, steps=SHORT) for name, job in VARIANTS.items()}
DAY = (
    "cp", "tp-zero2", "tp-overlap", "cp-zero3",
    *(("tp-head", "cp-heads") if LATER else ()),
)  # fmt: skip
BLOCKINT = {"codec": "blockint", "bits": 8}


def dimension(job: Job) -> str:
    return "tp" if job.tp > 1 else "cp"


def block(job: Job, settings: Any) -> dict[str, Any]:
    return {dimension(job): settings, "min_bytes": 0}


@pytest.fixture(scope="module")
def train() -> Iterator[Trained]:
    """Train on two ranks."""
    with Trained(2, split_trainer.run) as trained:
        yield trained


def assert_same(base: list[Outcome], other: list[Outcome]) -> None:
    for mine, theirs in zip(base, other, strict=True):
        assert theirs.losses == mine.losses
        assert theirs.digests == mine.digests


@pytest.mark.parametrize("name", by_day(LONG, ["tp", "cp"]))
def test_none_is_bit_identical(train: Trained, name: str) -> None:
    """With ``none`` every step equals the unpatched run bit for bit."""
    job = LONG[name]
    base, none = train(job), train(replace(job, block=block(job, "none")))
    assert_same(base, none)
    assert len(base[0].losses) == job.steps
    if job.steps == 50:
        assert base[0].losses[-1] < 0.9 * base[0].losses[0]
    for outcome in none:
        for way in ("forward", "backward"):
            messages, native, raw, wire = outcome.ledger[dimension(job), way]
            assert messages == native > 0 and raw == wire > 0


@pytest.mark.parametrize("name", by_day(LONG | VARIANTS, DAY))
def test_lossless_is_bit_identical(train: Trained, name: str) -> None:
    job = (LONG | VARIANTS)[name]
    lossless = train(replace(job, block=block(job, "mpc")))
    assert_same(train(job), lossless)
    assert_all_encoded(job, lossless)


@pytest.mark.parametrize(
    "name", by_day(["tp-checkpoint", "tp-overlap", "tp-accumulation"], ["tp-accumulation"])
)
def test_a_measured_dimension_is_native_for_a_step_or_for_good(train: Trained, name: str) -> None:
    """Recomputation, overlap and accumulation use the same choice within a step."""
    job = VARIANTS[name]
    auto = replace(job, block=block(job, {**BLOCKINT, "when": "auto"}))
    fast, slow = train(replace(auto, link=(0.01, 0.02))), train(replace(auto, link=(0.09, 0.01)))
    assert_same(train(job), fast)
    later = {**block(job, BLOCKINT), "start_step": 1}
    assert_same(train(replace(job, block=later)), slow)
    for way in ("forward", "backward"):
        messages, native, *_ = fast[0].ledger["tp", way]
        assert native == messages > 0
        messages, native, *_ = slow[0].ledger["tp", way]
        assert native == messages / SHORT


def assert_all_encoded(job: Job, outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        for way in ("forward", "backward"):
            messages, native, _, wire = outcome.ledger[dimension(job), way]
            assert messages > 0 and native == 0 and wire > 0


@pytest.mark.parametrize("name", by_day(LONG, ["tp", "cp"]))
def test_eight_bits_train_as_well(train: Trained, name: str) -> None:
    job = LONG[name]
    base, lossy = train(job), train(replace(job, block=block(job, BLOCKINT)))
    for mine, theirs in zip(base, lossy, strict=True):
        assert theirs.losses != mine.losses
        tails = (sum(outcome.losses[-10:]) for outcome in (mine, theirs))
        assert next(tails) == pytest.approx(next(tails), rel=0.005)
    if job.tp > 1:  # every rank of a tensor-parallel group gets the same sums
        assert lossy[0].losses == lossy[1].losses
        assert lossy[0].digests["norm.weight"] == lossy[1].digests["norm.weight"]


def wire_nbytes(numel: int) -> int:
    return make_codec("blockint", bits=8).wire_nbytes(numel, torch.float32)


@pytest.mark.parametrize("name", ["tp", "cp"])
def test_bytes_equal_the_closed_form(train: Trained, name: str) -> None:
    """Layers x messages x message / ratio, of which cp sends half."""
    job = LONG[name]
    message = BATCH * LENGTH * WIDTH // job.sp
    # AutoTP: two sums forward, one for each of q, k, v, gate and up backward, of whole values
    per_layer, sent = ({"forward": 2, "backward": 5}, message) if job.tp > 1 else (
        {"forward": 4, "backward": 4}, message // 2)  # fmt: skip
    for outcome in train(replace(job, block=block(job, BLOCKINT))):
        for way, each in per_layer.items():
            count = job.steps * LAYERS * each
            messages, native, raw, wire = outcome.ledger[name, way]
            assert (messages, native) == (count, 0)
            assert raw == count * sent * 4
            assert wire == pytest.approx(count * wire_nbytes(sent), rel=0.01)
            assert raw / wire == pytest.approx(32 / 8.258, rel=0.04)


@pytest.mark.parametrize("name", by_day(LONG, ["tp"]))
def test_recomputation_takes_the_forward_codec(train: Trained, name: str) -> None:
    """It runs in the backward pass, and its layers must get the same values again."""
    job = replace(LONG[name], steps=SHORT)
    ways = {"forward": BLOCKINT, "backward": "none"}
    plain = train(replace(job, block=block(job, ways)))
    again = train(replace(job, checkpoint=True, block=block(job, ways)))
    assert_same(plain, again)
    for outcome in plain:
        forward, backward = (outcome.ledger[dimension(job), way] for way in ways)
        assert forward[1] == 0 and forward[3] < 0.3 * forward[2]
        assert backward[0] == backward[1] and backward[2] == backward[3]
    most = again[0].ledger[dimension(job), "forward"][0]
    # upstream runs the recomputed last layers' all-reduce, although nothing reads it
    assert most == 2 * plain[0].ledger[dimension(job), "forward"][0]
    reverse = {"forward": "none", "backward": BLOCKINT}
    (found, _) = train(replace(job, block=block(job, reverse)))
    assert found.losses[0] == train(job)[0].losses[0]
    assert found.losses != train(job)[0].losses


@pytest.mark.skipif(not LATER, reason="this DeepSpeed gathers no logits")
def test_gathered_logits_are_counted(train: Trained) -> None:
    job = VARIANTS["tp-head"] if LATER else Job()
    for outcome in train(replace(job, block=block(job, "none"))):
        _, _, raw, _ = outcome.ledger["tp", "forward"]
        sums = LAYERS * 2 * BATCH * LENGTH * WIDTH * 4
        logits = BATCH * LENGTH * VOCAB // 2 * 4
        assert raw == SHORT * (sums + logits)


def test_residual_names(train: Trained) -> None:
    """Tensor-parallel ranks hold different parameters under the same names; sequence ranks not."""
    job = VARIANTS["tp-zero1"]
    first, second = train(replace(job, block=block(job, "mpc")))
    assert not set(first.names.values()) & set(second.names.values())
    job = VARIANTS["cp-zero1"]
    first, second = train(replace(job, block=block(job, "mpc")))
    assert first.names == second.names
    assert all(name == own for name, own in first.names.items())


@pytest.mark.parametrize(
    ("recipe", "job"),
    by_day([("autotp2", Job(tp=2)), ("ulysses2", Job(sp=2))], [("autotp2", Job(tp=2))]),
    ids=["autotp", "ulysses"],
)
def test_committed_configurations_train(recipe: str, job: Job) -> None:
    """Each file uses new ranks: DeepSpeed's mesh stays for the process."""
    baseline = json.loads((CONFIGS / f"ds_{recipe}_recommended.json").read_text())
    # the test's messages are small, and its link is a loopback
    block = baseline.pop("compression") | {"min_bytes": 0, "when": "always"}
    files = [baseline, {**baseline, "compression": block}]
    with RankPool(2) as pool:
        ranks = pool.run(split_parts.run_files, replace(job, steps=SHORT), files)
    for native, recommended in ranks:
        assert recommended.losses != native.losses
        assert recommended.losses[-1] == pytest.approx(native.losses[-1], rel=0.02)
        for way in ("forward", "backward"):
            messages, left, raw, wire = recommended.ledger[dimension(job), way]
            assert messages > left == 0 and wire < 0.3 * raw


@pytest.mark.parametrize("name", by_day(["tp", "cp"], ["cp"]))
def test_an_engine_without_a_block_is_left_alone(train: Trained, name: str) -> None:
    job = replace(LONG[name], steps=SHORT)
    with RankPool(2) as pool:
        ranks = pool.run(split_parts.run_beside, replace(job, block=block(job, BLOCKINT)))
    for rank, (messages, losses) in enumerate(ranks):
        assert messages == 0
        assert losses == train(job)[rank].losses


@pytest.mark.parametrize("stage", by_day([0, 1, 2], [1]))
def test_tensor_and_data_parallel(stage: int) -> None:
    """Four ranks: two replicas of two halves, with error feedback on the gradients."""
    job = Job(tp=2, stage=stage, steps=SHORT)
    zero = {"zero": BLOCKINT} if stage else {}
    feedback = {"codec": "blockint", "bits": 4, "error_feedback": True}
    blocks: list[dict[str, Any] | None] = [
        None,
        {"tp": "none", "dp": "none", **({"zero": "none"} if stage else {})},
        {"tp": BLOCKINT, "dp": feedback, **zero, "min_bytes": 0},
    ]
    with RankPool(4) as pool:
        ranks = pool.run(split_trainer.run, [replace(job, block=found) for found in blocks])
    for base, none, lossy in ranks:
        assert_same([base], [none])
        assert lossy.losses != base.losses
        assert lossy.losses[-1] == pytest.approx(base.losses[-1], rel=0.05)
        for key in (("tp", "forward"), ("tp", "backward"), ("dp", "forward")):
            messages, native, _, _ = lossy.ledger[key]
            assert messages > 0 and native == 0
    coded = [found[2] for found in ranks]
    for half in (0, 1):
        assert coded[half].digests == coded[half + 2].digests  # equal replicas
        assert coded[half].names == coded[half + 2].names
    assert not set(coded[0].names.values()) & set(coded[1].names.values())
    assert coded[0].digests["norm.weight"] == coded[1].digests["norm.weight"]
