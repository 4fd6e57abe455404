"""Pipelines: identical with native and lossless codecs, close with lossy ones, masks exact."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.ranks import run_ranks
from tests.selection import by_day, by_night
from tests.training.pipe_trainer import LENGTH, MICRO_BATCH, WIDTH, Job, Outcome, run

NONE = {"pp": "none"}
MPC = {"pp": "mpc", "dp": "mpc", "min_bytes": 0}
BLOCKINT = {"pp": {"codec": "blockint", "bits": 8}, "min_bytes": 0}
LOSSY = {"dp": {"codec": "blockint", "bits": 4, "error_feedback": True}, **BLOCKINT}
GATHERED = {"zero": {"codec": "blockint", "bits": 8}, **LOSSY}
BLOCKS = {
    "native": None,
    "none": NONE,
    "mpc": MPC,
    "blockint": BLOCKINT,
    "lossy": LOSSY,
    "gathered": GATHERED,
}
COMMON = ["native", "none", "mpc", "blockint"]

Results = dict[tuple[str, str], list[Outcome]]  # (job, block) -> result of every rank

HIDDEN = MICRO_BATCH * LENGTH * WIDTH  # elements of an activation
META_NBYTES = 1024  # shape message


def launch(world_size: int, jobs: dict[str, Job], blocks: dict[str, list[str]]) -> Results:
    """Run every job with each of its blocks in one launch."""
    keys = [(name, block) for name in jobs for block in blocks[name]]
    plan = [replace(jobs[name], block=BLOCKS[block]) for name, block in keys]
    by_rank = run_ranks(world_size, run, plan, timeout=280)
    return {key: [found[i] for found in by_rank] for i, key in enumerate(keys)}


@pytest.fixture(scope="module")
def two() -> Results:
    short = Job(steps=6)
    jobs = {
        "plain": Job(),
        "tied bf16": Job(tied=True, bf16=True, steps=10),
        "evaluate": replace(short, evaluate=True),
        "dynamic": replace(short, dynamic=True),
        "checkpoint": replace(short, checkpoint=True),
        "nan": replace(short, nan_step=3),
    }
    every = dict.fromkeys(jobs, COMMON)
    return launch(2, jobs, {**every, "nan": ["native", "blockint"]})


@pytest.fixture(scope="module")
def three(request: pytest.FixtureRequest) -> Results:
    masks = Job(stages=3, masks=True, steps=4, micro_batches=3)
    jobs = {
        "masks": masks,
        "masks evaluate": replace(masks, evaluate=True),
        "masks dynamic": replace(masks, dynamic=True),
        "masks checkpoint": replace(masks, checkpoint=True),
        "masks bf16": replace(masks, bf16=True),
    }
    if not by_night(request.config):
        jobs = {name: job for name, job in jobs.items() if ("three", name) in DAY}
    return launch(3, jobs, dict.fromkeys(jobs, COMMON))


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest) -> Results:
    jobs = {
        "tied bf16": Job(tied=True, bf16=True, steps=10),
        "tied zero": Job(tied=True, zero=1, steps=10),
        "tied": Job(tied=True, steps=10),
        "partitioned": Job(model_parallel=2, steps=10),
    }
    blocks = dict.fromkeys(jobs, COMMON)
    blocks["tied zero"] = blocks["tied bf16"] = [*COMMON, "lossy", "gathered"]
    blocks["tied"] = [*COMMON, "lossy"]
    if not by_night(request.config):
        jobs = {name: job for name, job in jobs.items() if ("four", name) in DAY}
    return launch(4, jobs, blocks)


CASES = [
    *(("two", name) for name in ("plain", "tied bf16", "evaluate", "dynamic", "checkpoint")),
    *(("three", f"masks{way}") for way in ("", " evaluate", " dynamic", " checkpoint", " bf16")),
    *(("four", name) for name in ("tied bf16", "tied zero", "tied", "partitioned")),
]
#: evaluation, recomputation and the like on two ranks only; masks and replicas on more
DAY = [
    *(case for case in CASES if case[0] == "two"),
    ("three", "masks"), ("four", "tied zero"), ("four", "partitioned"),
]  # fmt: skip
TIED = [case for case in CASES if case[1].startswith("tied")]
MASKS = [name for ranks, name in CASES if ranks == "three"]


@pytest.mark.parametrize("block", ["none", "mpc"])
@pytest.mark.parametrize(("ranks", "job"), by_day(CASES, DAY))
def test_identical(ranks: str, job: str, block: str, request: pytest.FixtureRequest) -> None:
    results: Results = request.getfixturevalue(ranks)
    for native, found in zip(results[job, "native"], results[job, block], strict=True):
        assert native.losses == found.losses
        assert native.evaluations == found.evaluations
        assert native.parameters == found.parameters
        assert native.masks == found.masks
        assert not native.messages
        assert found.messages


def assert_near(native: list[float], found: list[float]) -> None:
    """Check that the loss falls equally within 2 %, or 0.02 if it hardly falls."""
    fall = native[0] - native[-1]
    assert native[0] - found[-1] == pytest.approx(fall, rel=0.02, abs=0.02)
    assert found[-1] < found[0]


@pytest.mark.parametrize(("ranks", "job"), by_day(CASES, DAY))
def test_blockint_ends_near(ranks: str, job: str, request: pytest.FixtureRequest) -> None:
    results: Results = request.getfixturevalue(ranks)
    native, found = results[job, "native"][0].losses, results[job, "blockint"][0].losses
    assert native != found
    assert_near(native, found)


@pytest.mark.parametrize("block", COMMON)
@pytest.mark.parametrize("job", by_day(MASKS, ["masks"]))
def test_masks_arrive_bit_for_bit(job: str, block: str, three: Results) -> None:
    first, middle, last = three[job, block]
    assert first.masks == last.masks
    assert len(set(first.masks)) > 4
    assert not middle.masks


@pytest.mark.parametrize("block", COMMON)
@pytest.mark.parametrize(("ranks", "job"), by_day(TIED, [case for case in TIED if case in DAY]))
def test_tied_weights_stay_equal(
    ranks: str, job: str, block: str, request: pytest.FixtureRequest
) -> None:
    outcomes = request.getfixturevalue(ranks)[job, block]
    assert len({outcome.tied for outcome in outcomes}) == 1
    assert outcomes[0].tied


@pytest.mark.parametrize(
    ("job", "block"),
    by_day(
        [
            ("tied", "lossy"),
            ("tied bf16", "lossy"),
            ("tied bf16", "gathered"),
            ("tied zero", "lossy"),
            ("tied zero", "gathered"),
        ],
        [("tied zero", "lossy"), ("tied zero", "gathered")],
    ),
)
def test_tied_weights_stay_equal_when_stages_reduce_apart(
    job: str, block: str, four: Results
) -> None:
    native, found = four[job, "native"], four[job, block]
    assert len({outcome.tied for outcome in found}) == 1
    assert found[0].tied != native[0].tied
    # the ranks of a stage hold the same parameters
    assert found[0].parameters == found[1].parameters
    assert found[2].parameters == found[3].parameters
    assert_near(native[0].losses, found[0].losses)


def test_nan_stays_visible(two: Results) -> None:
    for native, found in zip(two["nan", "native"], two["nan", "blockint"], strict=True):
        assert [math.isnan(x) for x in native.losses] == [math.isnan(x) for x in found.losses]
        assert math.isnan(found.losses[3]) and not math.isnan(found.losses[2])


def blockint_nbytes(numel: int) -> int:
    """Return header, a byte per value, per block of 32 and per tile of 1024, aligned to 16."""
    payload = numel + -(-numel // 32) + -(-numel // 1024)
    return 32 + -(-payload // 16) * 16


def test_ledger_against_closed_form(two: Results, three: Results) -> None:
    sets = Job().steps * Job().micro_batches
    first, last = (dict_of(outcome) for outcome in two["plain", "blockint"])
    assert first == {
        "forward": (
            sets + 1,
            sets * HIDDEN * 4 + META_NBYTES,
            sets * blockint_nbytes(HIDDEN) + META_NBYTES,
        )
    }
    assert last == {"backward": (sets, sets * HIDDEN * 4, sets * blockint_nbytes(HIDDEN))}
    # hidden states, an additive mask [batch, length, length], a bool mask as half
    sets = 4 * 3
    additive = MICRO_BATCH * LENGTH * LENGTH * 4
    beside = additive + MICRO_BATCH * LENGTH * 2
    middle = dict_of(three["masks", "blockint"][1])
    assert middle["forward"] == (
        3 * sets + 1,
        sets * (HIDDEN * 4 + beside) + META_NBYTES,
        sets * (blockint_nbytes(HIDDEN) + beside) + META_NBYTES,
    )
    assert middle["backward"] == (
        2 * sets,
        sets * (HIDDEN * 4 + additive),
        sets * (blockint_nbytes(HIDDEN) + additive),
    )


def test_native_ledger_counts_every_message(two: Results) -> None:
    sets = Job().steps * Job().micro_batches
    raw = sets * HIDDEN * 4 + META_NBYTES
    assert dict_of(two["plain", "none"][0]) == {"forward": (sets + 1, raw, raw)}


def dict_of(outcome: Outcome) -> dict[str, tuple[int, int, int]]:
    """Return the pipeline's row of a ledger: direction to messages, raw and wire bytes."""
    return {way: (n, raw, wire) for name, way, n, raw, wire in outcome.messages if name == "pp"}
