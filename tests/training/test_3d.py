"""Tensor, pipeline and data parallel at once: DeepSpeed's pipeline of megatron-core's layers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import Trained, run_ranks
from tests.selection import by_day
from tests.training import context_trainer, slice_trainer
from tests.training.tensor_trainer import LAYERS, LENGTH, MICRO_BATCH, WIDTH, Job, Outcome, run

if find_spec("megatron") is None or find_spec("megatron.core") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow

#: nightly: identity over 50 steps
MANY = os.environ.get("HYBRIDCOMP_NIGHTLY") == "1"
STEPS = 50 if MANY else 3
FEW_BITS = {"codec": "blockint", "bits": 4, "backward": {"bits": 8}}
RECOMMENDED = {
    "preset": "recommended", "when": "always", "min_bytes": 0, "dp": {"error_feedback": True},
}  # fmt: skip
BLOCKS: dict[str, dict[str, Any] | None] = {
    "native": None,
    "none": dict.fromkeys(("dp", "zero", "tp", "pp"), "none"),
    "lossless": {"preset": "naive-mpc", "min_bytes": 0},
    "recommended": RECOMMENDED,
    "directions": {**RECOMMENDED, "tp": FEW_BITS, "pp": FEW_BITS},
}
EIGHT = {"cp": {"codec": "blockint", "bits": 8}, "min_bytes": 0, "ledger": {"every": 10**6}}
ACTIVATION = MICRO_BATCH * LENGTH * WIDTH  # elements


class Results:
    """``results[job, block]`` of four ranks, by rank."""

    def __init__(self, trained: Trained, folder: Path) -> None:
        self.trained = trained
        self._jobs = {
            "3d": Job(steps=STEPS),
            "whole sends": Job(partitioned=False),
            "tied bf16": Job(tied=True, bf16=True),
            "data": Job(pp=1),
            "one": Job(tp=1, pp=1, same_data=True),
            "two": Job(tp=2, pp=1, same_data=True),
            "short": Job(),
            "unbroken": Job(folder=str(folder), save=2),
            "unbroken resumed": Job(folder=str(folder), load=True),
            # replicas, for residuals of tensor-parallel shards
            "replicas": Job(pp=1, folder=f"{folder}/replicas", save=2),
            "replicas resumed": Job(pp=1, folder=f"{folder}/replicas", load=True),
        }

    def __getitem__(self, key: tuple[str, str]) -> list[Outcome]:
        job, block = key
        found = self.trained(replace(self._jobs[job], block=BLOCKS[block]))
        assert not (errors := [one for one in found if isinstance(one, str)]), errors
        return found


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    with Trained(4, run) as trained:
        yield Results(trained, tmp_path_factory.mktemp("checkpoint"))


EXACT = [
    (job, block)
    for job in ("3d", "whole sends", "tied bf16", "data")
    for block in ("none", "lossless")
]


@pytest.mark.parametrize(("job", "block"), by_day(EXACT, [("3d", "lossless")]))
def test_identical(job: str, block: str, four: Results) -> None:
    for native, found in zip(four[job, "native"], four[job, block], strict=True):
        assert native.losses == found.losses
        assert native.parameters == found.parameters
        assert found.ledger and not native.ledger


@pytest.mark.nightly
def test_any_cut_trains_alike(four: Results) -> None:
    """With the same weights and samples only the order of sums differs."""
    one = four["one", "native"][0].losses
    assert four["two", "native"][0].losses == pytest.approx(one, rel=1e-5)
    # two stages and one replica of the same samples
    assert four["short", "native"][0].losses == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize(
    ("block", "share"),
    by_day([("recommended", 0.02), ("directions", 0.05)], [("directions", 0.05)]),
)
def test_compressed_is_close(block: str, share: float, four: Results) -> None:
    """4-bit activations cost up to 3.6 % of a loss that falls to a third in 50 steps."""
    native, found = four["3d", "native"][0].losses, four["3d", block][0].losses
    assert native != found
    assert found == pytest.approx(native, rel=share)
    assert found[-1] < found[0]


@pytest.mark.parametrize(
    ("job", "block"),
    by_day(
        [("3d", "directions"), ("tied bf16", "directions"), ("data", "recommended")],
        [("3d", "directions")],
    ),
)
def test_what_no_rank_cuts_stays_equal(job: str, block: str, four: Results) -> None:
    """Every tensor rank of a stage updates its own copy of the norms."""
    found = four[job, block]  # "directions" sets pp, which a job without stages refuses
    assert found[0].whole and found[0].whole == found[1].whole
    assert found[2].whole and found[2].whole == found[3].whole


@pytest.mark.nightly
def test_tied_weights_stay_equal(four: Results) -> None:
    first, second, third, fourth = (
        {name: text for name, text in rank.parameters.items() if name.startswith("tied")}
        for rank in four["tied bf16", "recommended"]
    )
    assert first and first == third and second == fourth and first != second


def test_engine_counts_the_steps_and_lends(four: Results) -> None:
    for outcome in four["3d", "directions"]:
        assert outcome.step == STEPS and outcome.lent


@pytest.mark.parametrize("job", by_day(["3d", "tied bf16"], ["3d"]))
def test_residuals_have_a_name_on_every_rank(job: str, four: Results) -> None:
    names = [name for outcome in four[job, "directions"] for name in outcome.names]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", by_day(["unbroken", "replicas"], ["replicas"]))
def test_resumed_is_the_unbroken_one(name: str, four: Results) -> None:
    unbroken, resumed = (four[f"{name}{more}", "recommended"] for more in ("", " resumed"))
    for whole, part in zip(unbroken, resumed, strict=True):
        assert part.losses == whole.losses[2:]
        assert part.parameters == whole.parameters


def blockint_nbytes(numel: int, bits: int) -> int:
    """Return the payload: the values' bits, one byte per block of 32 and per tile of 1024."""
    payload = numel * bits // 8 + -(-numel // 32) + -(-numel // 1024)
    return -(-payload // 16) * 16


def test_bytes_are_the_closed_form(four: Results) -> None:
    """Layers x micro-batches x message / ratio, with each direction's codec."""
    sets = STEPS * Job().micro_batches
    found = four["3d", "directions"]
    total = {
        key: tuple(sum(outcome.ledger.get(key, (0,) * 4)[i] for outcome in found) for i in range(4))
        for key in {key for outcome in found for key in outcome.ledger}
    }
    # one stage of two tensor ranks holds the embedding, the other the output; LAYERS in between;
    # gathers of parts: an activation at receiver and sender, and its gradient
    reduced = {"forward": 1 + 2 * LAYERS, "backward": 2 * LAYERS + 1}
    gathered = {"forward": 2, "backward": 1}
    piece = ACTIVATION // 2
    for way, bits in (("forward", 4), ("backward", 8)):
        messages, native, raw, wire = total["tp", way]
        assert messages == 2 * sets * (reduced[way] + gathered[way])
        assert native == 0
        assert raw == 2 * sets * 4 * (reduced[way] * ACTIVATION + gathered[way] * piece)
        # two ranks exchange all of an activation that they reduce
        swapped = reduced[way] * blockint_nbytes(ACTIVATION, bits)
        expected = 2 * sets * (swapped + gathered[way] * blockint_nbytes(piece, bits))
        assert wire == pytest.approx(expected, rel=0.01)
        messages, native, raw, wire = total["pp", way]
        beside = raw - 2 * sets * 4 * piece  # partition metadata, shape message
        assert messages - native == 2 * sets and 0 < beside < 0.5 * raw
        assert wire - beside == pytest.approx(
            2 * sets * (blockint_nbytes(piece, bits) + 32), rel=0.01
        )


@pytest.mark.nightly
def test_native_bytes_are_counted(four: Results) -> None:
    for outcome, none in zip(four["3d", "directions"], four["3d", "none"], strict=True):
        assert none.ledger.keys() == outcome.ledger.keys()
        for key, (messages, native, raw, wire) in none.ledger.items():
            assert native == messages and wire == raw
            assert (messages, raw) == (outcome.ledger[key][0], outcome.ledger[key][2])


def test_tensor_ranks_of_a_sliced_pipeline(four: Results) -> None:
    """Two stages of two tensor ranks have the unsliced pipeline's losses."""
    jobs = [slice_trainer.Job(slices=""), slice_trainer.Job(tp=2, stage=1)]
    for plain, cut in four.trained.pool.run(slice_trainer.run, jobs):
        assert cut.losses == pytest.approx(plain.losses, rel=1e-5)


def test_rings_beside_tensor_ranks(four: Results) -> None:
    """Four ranks: two tensor ranks, two that share a sequence."""
    job = context_trainer.Job(tp=2, block=EIGHT)
    for (encoded,) in four.trained.pool.run(context_trainer.run, [job]):
        assert encoded.losses == pytest.approx(encoded.whole, rel=5e-3)
        assert encoded.losses != encoded.whole
        assert (encoded.told["data"], encoded.told["tensor"]) == (1, 2)


@pytest.mark.nightly
def test_eight_ranks() -> None:
    blocks = ("native", "none", "recommended")
    plan = [replace(Job(steps=10), block=BLOCKS[block]) for block in blocks]
    by_rank = run_ranks(8, run, plan, timeout=280)
    found = dict(zip(blocks, zip(*by_rank, strict=True), strict=True))
    for native, none in zip(found["native"], found["none"], strict=True):
        assert native.losses == none.losses and native.parameters == none.parameters
    compressed = found["recommended"]
    assert compressed[0].losses == pytest.approx(found["native"][0].losses, rel=0.02)
    for one, other in ((0, 2), (1, 3), (4, 6), (5, 7)):  # replicas
        assert compressed[one].parameters == compressed[other].parameters
    assert {name for name, _ in compressed[0].ledger} == {"dp", "zero", "tp", "pp"}
