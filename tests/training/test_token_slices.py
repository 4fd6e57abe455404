"""The example in a pipeline over token slices under DeepSpeed: like the whole model, compressed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import pytest
import train_gpt
from gpt import layouts, token_slices

from tests.ranks import RunRanks, Trained
from tests.selection import by_day
from tests.training.in_turn import first
from tests.training.slice_trainer import LENGTH, Job, run

pytest.importorskip("deepspeed")

QUIET = {"min_bytes": 0, "ledger": {"every": 10**6}}
EIGHT: dict[str, Any] = {"pp": {"codec": "blockint", "bits": 8}, **QUIET}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """Return each job's results on two ranks, by name."""
    folder = str(tmp_path_factory.mktemp("slices") / "checkpoint")
    jobs = {
        "whole": Job(slices=""),
        "unsliced": Job(slices="1"),
        "sliced": Job(folder=folder, save=2),
        "resumed": Job(folder=folder, load=True),
        "every token": Job(slices="24"),
        "auto": Job(slices="auto"),
        "bf16": Job(more={"bf16": {"enabled": True}}),
        "none": Job(block={"preset": "none", **QUIET}),
        "lossless": Job(block={"pp": "mpc", **QUIET}),
        "eight": Job(block=EIGHT),
        "zero 3": Job(stage=3),
    }
    with Trained(2, run, jobs) as trained:
        yield trained


@pytest.mark.parametrize(
    "name", by_day(["unsliced", "sliced", "every token", "auto"], ["sliced", "auto"])
)
def test_trains_as_the_whole_model(outcomes: Trained, name: str) -> None:
    """Every step clips, so the norm covers all stages."""
    whole, found = first(outcomes, "whole"), first(outcomes, name)
    assert whole.losses[-1] < whole.losses[0]
    assert found.losses == pytest.approx(whole.losses, rel=1e-6)
    assert found.valid == pytest.approx(whole.valid, rel=1e-6)


def test_resumed_is_the_unbroken_one(outcomes: Trained) -> None:
    whole = first(outcomes, "sliced").losses  # which saves
    assert first(outcomes, "resumed").losses == whole[2:]


@pytest.mark.nightly
def test_bf16_is_close(outcomes: Trained) -> None:
    whole = first(outcomes, "whole").losses
    assert first(outcomes, "bf16").losses == pytest.approx(whole, rel=1e-2)


def test_stages_and_slices_are_those_asked_for(outcomes: Trained) -> None:
    one, two = outcomes["sliced"]
    assert one.layers == ["Embedding", "Block"]
    assert two.layers == ["Block", "Block", "FinalNorm", "Output"]
    assert one.slices == (7, 9, 5, 3) and one.told["stages"] == 2
    chosen = outcomes["auto"][0].slices
    assert sum(chosen) == LENGTH and chosen == outcomes["auto"][1].slices


@pytest.mark.parametrize("name", by_day(["none", "lossless"], ["lossless"]))
def test_lossless_is_native(outcomes: Trained, name: str) -> None:
    assert first(outcomes, name).losses == first(outcomes, "sliced").losses


def test_every_slice_is_counted(outcomes: Trained) -> None:
    eight, native = first(outcomes, "eight").losses, first(outcomes, "sliced").losses
    assert eight != native and eight == pytest.approx(native, rel=5e-3)
    passes = 2 * 4 * 4  # micro-batches, slices, steps; and two validations forward
    for rank, (way, other) in enumerate((("forward", "backward"), ("backward", "forward"))):
        encoded, plain = (outcomes[name][rank].ledger for name in ("eight", "none"))
        more = 2 * 4 if way == "forward" else 0
        assert encoded["pp", way][:2] == (passes + more, 0)
        assert plain["pp", way][1] == plain["pp", way][0]
        assert encoded["pp", way][3] < 0.35 * plain["pp", way][3]
        assert ("pp", other) not in encoded


def test_weights_that_are_cut_are_refused(outcomes: Trained) -> None:
    assert "cut over ranks (ZeRO 3" in outcomes["zero 3"][0]


@pytest.mark.nightly
def test_replicas_of_a_sliced_pipeline(module_ranks: RunRanks) -> None:
    """Two pipelines of two stages: ZeRO 1 and 2, error feedback between them."""
    feedback = {"dp": {"codec": "blockint", "bits": 8, "error_feedback": True}, **EIGHT}
    jobs = [
        Job(slices="", replicas=2), Job(), Job(stage=1), Job(stage=2), Job(stage=1, block=feedback),
    ]  # fmt: skip
    for ranks in module_ranks(4, run, jobs):
        whole, *native, encoded = ranks
        for found in native:
            assert found.losses == pytest.approx(whole.losses, rel=1e-6)
        assert encoded.losses == pytest.approx(whole.losses, rel=1e-2)
        assert encoded.losses != native[1].losses


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pp", "1"], "expected --pp of at least 2"),
        (["--engine", "ddp"], "--engine deepspeed"),
        (["--tp2d", "2"], "no --tp2d"),
        (["--cp", "2"], "no --cp"),
        (["--recompute", "0"], "no --recompute"),
        (["--tie-embeddings"], "no --tie-embeddings"),
        (["--slices", "0"], "how many slices"),
        (["--slices", "64,32"], "128 together"),
        (["--slices", "64,x"], "expected auto"),
    ],
)
def test_what_slices_do_not_go_with(words: list[str], said: str) -> None:
    base = ["--deepspeed_config", "x", "--pp", "2", "--slices", "auto"]
    arguments: argparse.Namespace = train_gpt.parse([*base, *words])
    with pytest.raises(layouts.ParallelismError, match=said):
        layouts.check(arguments, {})


def test_zero_3_is_refused_before_anything_is_built() -> None:
    arguments = train_gpt.parse(["--deepspeed_config", "x", "--pp", "2", "--slices", "2"])
    with pytest.raises(layouts.ParallelismError, match="stage 0, 1 or 2"):
        layouts.check(arguments, {"zero_optimization": {"stage": 3}})


def test_lengths_of_slices() -> None:
    assert token_slices.lengths_of("3", 128) == (42, 43, 43)
    assert token_slices.lengths_of("100,28", 128) == (100, 28)
