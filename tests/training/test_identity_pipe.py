"""Pipelines: identical with native and lossless codecs, close with lossy ones, masks exact."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.ranks import Trained
from tests.selection import by_day
from tests.training.pipe_trainer import LENGTH, MICRO_BATCH, WIDTH, Job, Outcome, run

NIGHTLY = os.environ.get("HYBRIDCOMP_NIGHTLY") == "1"

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

HIDDEN = MICRO_BATCH * LENGTH * WIDTH  # elements of an activation
META_NBYTES = 1024  # shape message


SHORT, TIED_BF16 = Job(steps=6), Job(tied=True, bf16=True, steps=8)
THREE = Job(stages=3, masks=True, steps=4, micro_batches=3)
#: ranks -> jobs by name
JOBS: dict[str, dict[str, Job]] = {
    "two": {
        "plain": Job(steps=50 if NIGHTLY else 8),
        "tied bf16": TIED_BF16,
        "evaluate": replace(SHORT, evaluate=True),
        "dynamic": replace(SHORT, dynamic=True),
        "checkpoint": replace(SHORT, checkpoint=True),
        "nan": replace(SHORT, nan_step=3),
    },
    "three": {
        "masks": THREE,
        "masks evaluate": replace(THREE, evaluate=True),
        "masks dynamic": replace(THREE, dynamic=True),
        "masks checkpoint": replace(THREE, checkpoint=True),
        "masks bf16": replace(THREE, bf16=True),
    },
    "four": {
        "tied bf16": TIED_BF16,
        "tied zero": Job(tied=True, zero=1, steps=8),
        "tied": Job(tied=True, steps=8),
        "partitioned": Job(model_parallel=2, steps=6),
    },
}


class Pipelines:
    """Trained jobs with blocks: ``pipelines[ranks, job, block]``."""

    def __init__(self, ranks: dict[str, Trained]) -> None:
        self._ranks = ranks

    def __getitem__(self, case: tuple[str, str, str]) -> list[Outcome]:
        ranks, job, block = case
        return self._ranks[ranks](replace(JOBS[ranks][job], block=BLOCKS[block]))


@pytest.fixture(scope="module")
def trained() -> Iterator[Pipelines]:
    with Trained(2, run) as two, Trained(3, run) as three, Trained(4, run) as four:
        yield Pipelines({"two": two, "three": three, "four": four})


CASES = [(ranks, job) for ranks, jobs in JOBS.items() for job in jobs if job != "nan"]
TIED = [case for case in CASES if case[1].startswith("tied")]
#: evaluation and recomputation on two ranks only; masks and replicas on more
DAY = [
    ("two", "plain"), ("two", "evaluate"), ("two", "dynamic"), ("two", "checkpoint"),
    ("three", "masks"), ("four", "tied zero"), ("four", "partitioned"),
]  # fmt: skip
EXACT = [(*case, block) for case in CASES for block in ("none", "mpc")]
DAY_EXACT = [("two", "plain", "none"), *((*case, "mpc") for case in DAY)]


@pytest.mark.parametrize(("ranks", "job", "block"), by_day(EXACT, DAY_EXACT))
def test_identical(trained: Pipelines, ranks: str, job: str, block: str) -> None:
    for native, found in zip(
        trained[ranks, job, "native"], trained[ranks, job, block], strict=True
    ):
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


@pytest.mark.parametrize(("ranks", "job"), by_day(CASES, [("two", "plain"), ("three", "masks")]))
def test_blockint_ends_near(trained: Pipelines, ranks: str, job: str) -> None:
    native = trained[ranks, job, "native"][0].losses
    found = trained[ranks, job, "blockint"][0].losses
    assert native != found
    assert_near(native, found)


@pytest.mark.parametrize("block", by_day(COMMON, ["mpc", "blockint"]))
@pytest.mark.parametrize("job", by_day(JOBS["three"], ["masks"]))
def test_masks_arrive_bit_for_bit(trained: Pipelines, job: str, block: str) -> None:
    first, middle, last = trained["three", job, block]
    assert first.masks == last.masks
    assert len(set(first.masks)) > 4
    assert not middle.masks


TIES = [(*case, block) for case in TIED for block in COMMON]


@pytest.mark.parametrize(
    ("ranks", "job", "block"), by_day(TIES, [("four", "tied zero", b) for b in ("native", "mpc")])
)
def test_tied_weights_stay_equal(trained: Pipelines, ranks: str, job: str, block: str) -> None:
    outcomes = trained[ranks, job, block]
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
        [("tied zero", "gathered")],
    ),
)
def test_tied_weights_stay_equal_when_stages_reduce_apart(
    trained: Pipelines, job: str, block: str
) -> None:
    native, found = trained["four", job, "native"], trained["four", job, block]
    assert len({outcome.tied for outcome in found}) == 1
    assert found[0].tied != native[0].tied
    # the ranks of a stage hold the same parameters
    assert found[0].parameters == found[1].parameters
    assert found[2].parameters == found[3].parameters
    assert_near(native[0].losses, found[0].losses)


def test_nan_stays_visible(trained: Pipelines) -> None:
    nan = [trained["two", "nan", block] for block in ("native", "blockint")]
    for native, found in zip(*nan, strict=True):
        assert [math.isnan(x) for x in native.losses] == [math.isnan(x) for x in found.losses]
        assert math.isnan(found.losses[3]) and not math.isnan(found.losses[2])


def blockint_nbytes(numel: int) -> int:
    """Return header, a byte per value, per block of 32 and per tile of 1024, aligned to 16."""
    payload = numel + -(-numel // 32) + -(-numel // 1024)
    return 32 + -(-payload // 16) * 16


def test_ledger_against_closed_form(trained: Pipelines) -> None:
    plain = JOBS["two"]["plain"]
    sets = plain.steps * plain.micro_batches
    first, last = (dict_of(outcome) for outcome in trained["two", "plain", "blockint"])
    assert first == {
        "forward": (
            sets + 1,
            sets * HIDDEN * 4 + META_NBYTES,
            sets * blockint_nbytes(HIDDEN) + META_NBYTES,
        )
    }
    assert last == {"backward": (sets, sets * HIDDEN * 4, sets * blockint_nbytes(HIDDEN))}
    # hidden states, an additive mask [batch, length, length], a bool mask as half
    sets = THREE.steps * THREE.micro_batches
    additive = MICRO_BATCH * LENGTH * LENGTH * 4
    beside = additive + MICRO_BATCH * LENGTH * 2
    middle = dict_of(trained["three", "masks", "blockint"][1])
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


def test_native_ledger_counts_every_message(trained: Pipelines) -> None:
    plain = JOBS["two"]["plain"]
    sets = plain.steps * plain.micro_batches
    raw = sets * HIDDEN * 4 + META_NBYTES
    assert dict_of(trained["two", "plain", "none"][0]) == {"forward": (sets + 1, raw, raw)}


def dict_of(outcome: Outcome) -> dict[str, tuple[int, int, int]]:
    """Return the pipeline's row of a ledger: direction to messages, raw and wire bytes."""
    return {way: (n, raw, wire) for name, way, n, raw, wire in outcome.messages if name == "pp"}
