"""GPT-NeoX's training loop: identical with native and lossless codecs, close with lossy ones.

Needs a checkout, GPT_NEOX_HOME, and an environment that can import it; upstream compiles its
dataset helpers into the checkout when training.
"""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.training.neox_trainer import LAYERS, Job, Outcome, run, write_data

HOME = os.environ.get("GPT_NEOX_HOME", "")

pytestmark = [
    pytest.mark.skipif(not HOME, reason="GPT_NEOX_HOME names no GPT-NeoX checkout"),
    pytest.mark.skipif(find_spec("transformers") is None, reason="GPT-NeoX needs transformers"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

B8: dict[str, Any] = {"codec": "blockint", "bits": 8}
#: layout, its dimensions; the second number of ranks is their product
LAYOUTS = {"TP2": (Job(tp=2), "tp"), "PP2": (Job(pp=2), "pp"), "TP2xPP2": (Job(2, 2), "tp pp")}
RECOMPUTE = {"checkpoint_activations": True, "checkpoint_num_layers": 1}
STEPS = 50

Results = dict[str, list[Outcome]]  # job -> result of every rank


def block(dimensions: str, codec: Any) -> dict[str, Any]:
    return {**dict.fromkeys(dimensions.split(), codec), "min_bytes": 0}


def launch(folder: Path, jobs: dict[str, Job]) -> Results:
    """Run all jobs of one layout in one launch."""
    write_data(str(folder))
    first = next(iter(jobs.values()))
    by_rank = run_ranks(
        first.tp * first.pp, run, list(jobs.values()), HOME, str(folder), timeout=500
    )
    return {name: [found[i] for found in by_rank] for i, name in enumerate(jobs)}


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def results(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Results:
    job, dimensions = LAYOUTS[layout]
    long, lossy = replace(job, steps=STEPS), replace(job, block=block(dimensions, B8))
    jobs = {
        "unpatched": long,
        "none": replace(long, block=block(dimensions, "none")),
        "short": job,
        "raw": replace(lossy, raw=True),
        "expcode": replace(job, block=block(dimensions, "expcode")),
        "blockint": lossy,
    }
    if layout == "TP2":
        again = replace(job, settings=RECOMPUTE)
        sequence = replace(job, settings={"sequence_parallel": True})
        jobs |= {
            "recompute short": again,
            "recompute raw": replace(again, block=lossy.block, raw=True),
            "recompute blockint": replace(again, block=lossy.block),
            "sequence short": sequence,
            "sequence raw": replace(sequence, block=lossy.block, raw=True),
            "sequence blockint": replace(sequence, block=lossy.block),
        }
    return launch(tmp_path_factory.mktemp("neox"), jobs)


def same(one: list[Outcome], two: list[Outcome]) -> bool:
    return all(
        a.losses == b.losses and a.digests == b.digests for a, b in zip(one, two, strict=True)
    )


def test_none_is_bit_identical(results: Results) -> None:
    assert len(results["none"][0].losses) == STEPS
    assert results["unpatched"][0].losses[-1] < results["unpatched"][0].losses[0] - 0.5
    assert same(results["none"], results["unpatched"])


@pytest.mark.parametrize("codec", ["raw", "expcode"])
def test_lossless_through_the_compressed_path_is_bit_identical(
    results: Results, layout: str, codec: str
) -> None:
    dimensions = LAYOUTS[layout][1].split()
    for rank in results[codec]:
        for dimension in dimensions:
            assert any(key[0] == dimension and row[0] > row[1] for key, row in rank.ledger.items())
    assert same(results[codec], results["short"])


def test_blockint_8_stays_close(results: Results) -> None:
    for rank, outcome in enumerate(results["blockint"]):
        reference = results["short"][rank].losses
        assert outcome.losses == pytest.approx(reference, rel=2e-3)
        assert outcome.losses != reference


def test_masks_arrive_exactly(results: Results) -> None:
    for outcomes in results.values():
        for outcome in outcomes:
            assert outcome.masks and all(outcome.masks)


def test_masks_and_metadata_are_not_marked_as_values(results: Results, layout: str) -> None:
    first, last = results["blockint"][0], results["blockint"][-1]
    # with tensor parallelism: metadata, a part of the activation, mask
    expected = {"TP2": [], "PP2": [True, False], "TP2xPP2": [False, True, False]}
    assert first.marks == expected[layout]
    assert last.marks == []


def test_recomputation_repeats_the_forward_collectives(results: Results, layout: str) -> None:
    if layout != "TP2":
        pytest.skip("run with TP2")
    assert same(results["recompute raw"], results["recompute short"])
    # autograd then adds in another order; other activations would differ in the fourth digit
    for with_it, without in (("recompute short", "short"), ("recompute blockint", "blockint")):
        without_it = results[without][0].losses
        assert results[with_it][0].losses == pytest.approx(without_it, rel=1e-6)
    once = results["blockint"][0].ledger["tp", "forward"]
    twice = results["recompute blockint"][0].ledger["tp", "forward"]
    passes = LAYOUTS[layout][0].steps * LAYOUTS[layout][0].micro_batches
    assert twice[0] - once[0] == passes * 2 * LAYERS
    assert twice[1] == 0
    backward = results["recompute blockint"][0].ledger["tp", "backward"]
    assert backward == results["blockint"][0].ledger["tp", "backward"]


def test_sequence_parallel(results: Results, layout: str) -> None:
    if layout != "TP2":
        pytest.skip("run with TP2")
    assert same(results["sequence raw"], results["sequence short"])
    for outcome, reference in zip(
        results["sequence blockint"], results["sequence short"], strict=True
    ):
        assert outcome.losses == pytest.approx(reference.losses, rel=2e-3)
        for way in ("forward", "backward"):
            messages, native, raw, wire = outcome.ledger["tp", way]
            assert messages and native == 0 and raw / wire > 3.5
