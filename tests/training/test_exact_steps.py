"""stepcode under ``zero`` on DeepSpeed engines: trained, skipped, saved and resumed as native."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

from tests.ranks import RunRanks
from tests.selection import by_day

if find_spec("deepspeed") is None:  # importing it here would take longer than the tests
    pytest.skip("needs deepspeed", allow_module_level=True)

from tests.training.trainer import (
    Job,
    Outcome,
    digests,
    make_engine,
    run,
    train_step,
    write_into,
)

STEPS = 6
STEPCODE: dict[str, Any] = {"zero": "stepcode", "min_bytes": 0}
ZERO1, ZERO2 = Job(1, "bf16", steps=STEPS), Job(2, "bf16", steps=STEPS)
#: a loss scale that overflows in the first steps, and a step with non-finite gradients
OVERFLOWS = {"fp16": {"enabled": True}}
JOBS = {
    "zero1": ZERO1,
    "zero2": ZERO2,
    "bf16_optimizer": replace(ZERO1, bf16_optimizer=True),
    "accumulation": replace(ZERO2, accumulation=2),
    "overflows": replace(ZERO1, dtype="fp16", ds_json=OVERFLOWS, nan_step=4, steps=10),
    "overflows at zero2": replace(ZERO2, dtype="fp16", ds_json=OVERFLOWS, nan_step=4, steps=10),
    "offload": replace(ZERO2, zero={"offload_optimizer": {"device": "cpu"}}),
    "small learning rate": replace(ZERO1, lr=1e-5),
}
DAY = ("zero1", "bf16_optimizer", "accumulation", "overflows at zero2", "offload")


def assert_as_native(ranks: RunRanks, job: Job, block: dict[str, Any]) -> list[Outcome]:
    """Train unpatched and with ``block`` on two ranks; return the latter's results, by rank."""
    results = ranks(2, run, [job, replace(job, block=block)])
    for native, coded in results:
        assert repr(coded.losses) == repr(native.losses)  # NaN is not equal to itself
        assert coded.digests == native.digests
        assert coded.skipped == native.skipped
    assert len({outcome.digests["middle.weight"] for _, outcome in results}) == 1
    return [outcome for _, outcome in results]


@pytest.mark.parametrize("name", by_day(JOBS, DAY))
def test_two_ranks_train_as_natively(module_ranks: RunRanks, name: str) -> None:
    job = JOBS[name]
    for outcome in assert_as_native(module_ranks, job, STEPCODE):
        messages, native, raw, wire = outcome.ledger["zero"]
        taken = job.steps - sum(outcome.skipped)
        assert (messages, native) == (taken, 1), "only the first gather is native"
        assert any(outcome.skipped) == ("overflows" in name)
        first = raw // taken
        saved = 0.8 if name == "small learning rate" else 0.25
        assert wire - first < (1 - saved) * (raw - first)


@pytest.mark.parametrize(
    ("keys", "native"),
    [
        ({"start_step": 3}, 4),  # three before, and the first that sets a reference
        ({"min_bytes": 1 << 20}, STEPS),
        ({"zero": {"codec": "stepcode", "resync_every": 2}}, STEPS // 2),
    ],
)
def test_what_stays_native(module_ranks: RunRanks, keys: dict[str, Any], native: int) -> None:
    for outcome in assert_as_native(module_ranks, ZERO1, {**STEPCODE, **keys}):
        assert outcome.ledger["zero"][:2] == (STEPS, native)


def resumed(job: Job, folder: str, save: bool) -> tuple[list[float], dict[str, str], int]:
    """Return losses from step 3 on of a run that saved there, or loaded the save."""
    engine = make_engine(job)
    if save:
        for step in range(3):
            train_step(engine, job, step)
        engine.save_checkpoint(folder, tag="third")
    else:
        engine.load_checkpoint(folder, tag="third")
    found = [train_step(engine, job, step) for step in range(3, STEPS)]
    return found, digests(engine), gathers(engine)


def gathers(engine: Any) -> int:
    """Return the encoded gathers."""
    from hybridcomp.channels import channels_of

    channels = channels_of(engine)
    if channels is None:
        return 0
    entry = channels.ledger.interval["zero", "forward"]
    return int(entry.messages - entry.native)


@pytest.mark.parametrize("job", [ZERO1, pytest.param(ZERO2, marks=pytest.mark.nightly)])
def test_a_resumed_run_is_the_unbroken_one(module_ranks: RunRanks, job: Job, tmp_path: Any) -> None:
    """The first gather after loading is exact; the checkpoint has no additional files."""
    coded, native, folder = replace(job, block=STEPCODE), str(tmp_path / "n"), str(tmp_path / "c")
    unbroken = [found[:2] for found in module_ranks(2, resumed, job, native, True)]
    for save, encoded in ((True, STEPS - 1), (False, STEPS - 4)):
        results = module_ranks(2, resumed, coded, folder, save)
        assert [found[:2] for found in results] == unbroken
        assert {found[2] for found in results} == {encoded}
    assert not list((tmp_path / "c").rglob("hybridcomp_parameters*"))
    assert [found[:2] for found in module_ranks(2, resumed, job, folder, False)] == unbroken


def weights_only(job: Job, folder: str) -> tuple[dict[str, str], int]:
    """Load weights from a checkpoint of another number of ranks, and train."""
    engine = make_engine(job)
    for step in range(2):
        train_step(engine, job, step)
    engine.load_checkpoint(folder, tag="third", load_module_only=True)
    for step in range(2, STEPS):
        train_step(engine, job, step)
    return digests(engine), gathers(engine)


def test_weights_of_two_ranks_go_on_with_four(module_ranks: RunRanks, tmp_path: Any) -> None:
    """Every rank had a reference before the load; none of them is used afterwards."""
    folder = str(tmp_path)
    module_ranks(2, resumed, replace(ZERO1, block=STEPCODE), folder, True)
    native = module_ranks(4, weights_only, ZERO1, folder)
    coded = module_ranks(4, weights_only, replace(ZERO1, block=STEPCODE), folder)
    assert [found for found, _ in coded] == [found for found, _ in native]
    assert {encoded for _, encoded in coded} == {STEPS - 2}


def written(job: Job, how: str) -> tuple[dict[str, str], int]:
    """Write into or read the weights on one rank; return the weights after a step."""
    engine = make_engine(job)
    for step in range(3):
        train_step(engine, job, step)
    write_into(engine, how)
    train_step(engine, job, 3)
    return digests(engine), gathers(engine)


@pytest.mark.parametrize("how", ["one rank", "load_state_dict", "resync"])
def test_written_weights_are_gathered_exactly(module_ranks: RunRanks, how: str) -> None:
    native = module_ranks(2, written, ZERO2, how)
    coded = module_ranks(2, written, replace(ZERO2, block=STEPCODE), how)
    assert [found for found, _ in coded] == [found for found, _ in native]
    assert coded[0][0] == coded[1][0]
    assert {encoded for _, encoded in coded} == {2}, "the gather after it was exact"
