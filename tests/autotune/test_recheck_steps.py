"""``when: auto`` compares steps after a close trial, and changes once, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from hybridcomp.autotune import recheck, trials
from hybridcomp.channels import Channels, channels_of, online_tuner
from tests.ranks import RankPool, RunRanks
from tests.selection import by_day
from tests.stand_ins.link_clock import clock

if find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

from hybridcomp.patches.ds.zero import secondary
from tests.training import pipe_trainer
from tests.training.trainer import Job, digests, make_engine, train_step

FEEDBACK = {"codec": "blockint", "bits": 4, "error_feedback": True, "when": "auto"}
EIGHT = {"codec": "blockint", "bits": 8, "when": "auto"}
BLOCK = {"dp": FEEDBACK, "zero": EIGHT, "min_bytes": 0, "ledger": {"sample_every": 2}}
#: close trials: encoded slightly faster, native slightly faster
CODED, NATIVE = (0.012, 0.010), (0.010, 0.012)
#: warm, rehearsed, one round
FIRST, STOP = 3, 3 + 2 + 8
#: seconds per step of a dimension's messages: native and encoded
Costs = Mapping[str, tuple[float, float]]


@pytest.fixture(scope="module")
def stages() -> Iterator[RankPool]:
    """Run in separate ranks: DeepSpeed keeps a pipeline's grid for the rest of a process."""
    with RankPool(2) as ranks:
        yield ranks


@contextmanager
def timed(channels: Channels, costs: Costs) -> Iterator[list[str]]:
    """Fake the clock: a step takes a second plus the cost of each dimension; yields the log.

    A minute passes between steps.
    """
    seconds, said = 0.0, []
    close: Callable[..., list[str]] = channels.close_step

    def closed(*args: Any) -> list[str]:
        nonlocal seconds
        step = channels.step - 1
        seconds += 1.0 + dist.get_rank() * 0.01
        for name, (native_s, coded_s) in costs.items():
            seconds += native_s if channels.verdicts.native(name, step) else coded_s  # type: ignore[arg-type]
        said.extend(sentences := close(*args))
        seconds += 60.0 + channels.step
        return sentences

    with (
        patch.object(recheck, "now", lambda: seconds),
        patch.object(channels, "close_step", closed),
    ):
        yield said


def trained(job: Job, trial: tuple[float, float], costs: Costs) -> dict[str, Any]:
    with clock(*trial):
        engine = make_engine(job)
    channels = channels_of(engine)
    assert channels is not None
    outcome: dict[str, Any] = {"losses": [], "modes": [], "held": [], "codecs": []}
    outcome["gathers"], outcome["whole"] = set(), []
    with timed(channels, costs) as outcome["told"]:
        for step in range(job.steps):
            channels.ledger.restart()
            outcome["modes"].append([not channels.verdicts.native(n, step) for n in ("dp", "zero")])
            outcome["losses"].append(train_step(engine, job, step))
            outcome["held"].append(channels.residuals.norm())
            outcome["codecs"].append(list(channels.ledger.used.get(("dp", "forward"), ())))
            outcome["gathers"].update(channels.ledger.used.get(("zero", "forward"), ()))
            entry = channels.ledger.interval["zero", "forward"]
            outcome["whole"].append(bool(entry.native))
    rows = channels.ledger.rows(channels.ledger.interval)
    outcome["since"] = {
        name: (ways["forward"]["native_since"], ways["forward"]["encoded_since"])
        for name, ways in rows.items()
    }
    outcome["digests"] = digests(engine)
    copies = [getattr(param, secondary.ATTRIBUTE, None) for param in engine.module.parameters()]
    outcome["held_copies"] = sum(copy is not None and copy.held is not None for copy in copies)
    engine.destroy()
    return outcome


@pytest.mark.parametrize("stage", [1, 3])
def test_native_by_its_trial_and_faster_encoded(module_ranks: RunRanks, stage: int) -> None:
    job = Job(stage, steps=STOP + 3, block=BLOCK)
    both = module_ranks(2, trained, job, NATIVE, {"dp": (0.3, 0.1), "zero": (0.3, 0.4)})
    for outcome in both:
        assert outcome["modes"][:FIRST] == [[False, False]] * FIRST
        assert outcome["modes"][FIRST : FIRST + 2] == [[False, False], [True, True]]
        window = outcome["modes"][FIRST + 2 : STOP]
        assert all(window.count([dp, zero]) == 2 for dp in (False, True) for zero in (False, True))
        assert outcome["modes"][STOP:] == [[True, False]] * 3
        assert outcome["since"] == {"dp": (None, STOP), "zero": (0, None)}
        begun, dp, zero = outcome["told"]
        assert begun.startswith(
            "dp, zero: a trial times messages alone, so "
            f"steps {FIRST} to {STOP - 1}, or {STOP + 7} where it is close, run in both ways"
        )
        assert dp.startswith("dp: steps took ") and f"compressed from step {STOP} on" in dp
        assert zero.endswith("(compression.zero.when: auto): stays native")
    assert both[0]["digests"] == both[1]["digests"]


def test_encoded_by_its_trial_and_faster_natively(module_ranks: RunRanks) -> None:
    """The residuals are sent losslessly first; then steps equal upstream's."""
    job = Job(1, steps=STOP + 3, block=BLOCK)
    for result in module_ranks(2, trained, job, CODED, {"dp": (0.1, 0.3), "zero": (0.1, 0.3)}):
        assert result["modes"][STOP:] == [[False, False]] * 3
        assert result["since"] == {"dp": (STOP, None), "zero": (STOP, None)}
        assert all(held > 0 for held in result["held"][:STOP]), "kept in native steps between"
        assert result["codecs"][STOP - 1] == ["blockint(bits=4)"]
        assert result["codecs"][STOP] == ["expcode()"] and result["held"][STOP] == 0
        assert result["codecs"][STOP + 1] == []


def test_deltas_go_on_between_native_steps(module_ranks: RunRanks) -> None:
    """An encoded step after a native step sends deltas; a full send would distort its time."""
    zero = {**EIGHT, "bits": 4, "delta": True}
    job = Job(1, steps=STOP + 1, block={**BLOCK, "dp": "none", "zero": zero})
    for result in module_ranks(2, trained, job, NATIVE, {"zero": (0.1, 0.15)}):
        encoded = [i & 1 == 1 for i in range(8)] + [False]
        assert [mode for _, mode in result["modes"][-9:]] == encoded
        assert result["whole"][-9:] == [not mode for mode in encoded]


def with_copies(block: dict[str, Any] | None, costs: Costs) -> dict[str, Any]:
    """Train on two nodes of two ranks; also return the codecs of the trials."""
    from deepspeed.utils import groups

    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # made once per process
    zero = {
        "zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0,
    }  # fmt: skip
    job = Job(3, "bf16", steps=STOP + 4, zero=zero, block=block)
    if block is None:
        engine = make_engine(job)
        losses = [train_step(engine, job, step) for step in range(job.steps)]
        return {"losses": losses, "digests": digests(engine)}
    tried: list[tuple[str, tuple[int, ...]]] = []

    def built(codec: Any, place: Any) -> Any:
        def of(sent: Any) -> Any:
            tried.append((codec.spec, sent.numels))
            return trials.gathers(codec, place)(sent)

        return of

    with patch.object(online_tuner, "gathers", built):
        return {**trained(job, CODED, costs), "tried": tried}


@pytest.mark.parametrize("pays", by_day([True, False], [True]))
def test_copies_in_nodes_are_weighed_by_their_steps(module_ranks: RunRanks, pays: bool) -> None:
    """The copy outlasts native steps, so that every encoded step sends changes only."""
    block = {
        "zero": {"secondary": "exact", "when": "auto"}, "min_bytes": 0,
        "hierarchy": 2, "ledger": {"sample_every": 0},
    }  # fmt: skip
    costs = {"zero": (0.3, 0.1) if pays else (0.1, 0.3)}
    natively = module_ranks(4, with_copies, None, {})
    for plain, result in zip(natively, module_ranks(4, with_copies, block, costs), strict=True):
        assert result["digests"] == plain["digests"] and result["losses"] == plain["losses"]
        assert {spec for spec, _ in result["tried"]} == {"stepcode()"}
        modes = [zero for _, zero in result["modes"]]
        assert {True, False} == set(modes[FIRST:STOP]) and modes[STOP:] == [pays] * 4
        assert result["gathers"] == {"stepcode()"}, "never whole: DeepSpeed makes the first copy"


@pytest.mark.parametrize("pays", by_day([True, False], [False]))
def test_encoded_copies_that_stay_native_are_freed(module_ranks: RunRanks, pays: bool) -> None:
    block = {
        "zero": {"secondary": {"bits": 8}, "when": "auto"}, "min_bytes": 0,
        "hierarchy": 2, "ledger": {"sample_every": 0},
    }  # fmt: skip
    costs = {"zero": (0.3, 0.1) if pays else (0.1, 0.3)}
    for result in module_ranks(4, with_copies, block, costs):
        assert [zero for _, zero in result["modes"][STOP:]] == [pays] * 4
        assert bool(result["held_copies"]) is pays


def resumed(folder: str, job: Job, stop: int, costs: Costs) -> tuple[Any, ...]:
    """Run ``stop`` steps, save, run the rest; then repeat the rest after a restart."""

    def steps(engine: Any, start: int) -> list[float]:
        with timed(channels_of(engine), costs):  # type: ignore[arg-type]
            return [train_step(engine, job, step) for step in range(start, job.steps)]

    with clock(*CODED):
        engine = make_engine(job)
    with timed(channels_of(engine), costs):  # type: ignore[arg-type]
        for step in range(stop):
            train_step(engine, job, step)
        engine.save_checkpoint(folder, tag="x")
    whole = steps(engine, stop)
    with clock(*CODED):
        again = make_engine(job)
    again.load_checkpoint(folder, tag="x")
    losses = steps(again, stop)
    channels = channels_of(again)
    assert channels is not None
    return whole, losses, channels.verdicts.state(), channels.residuals.nbytes


@pytest.mark.parametrize("stop", by_day([STOP - 1, STOP, STOP + 1], [STOP]))
def test_a_run_that_is_continued_after_it_stays_as_it_was(
    module_ranks: RunRanks, tmp_path: Path, stop: int
) -> None:
    job = Job(1, steps=STOP + 4, block={**BLOCK, "ledger": {"sample_every": 0}})
    costs = {"dp": (0.1, 0.3), "zero": (0.3, 0.1)}
    for whole, losses, state, held in module_ranks(2, resumed, str(tmp_path), job, stop, costs):
        if stop < STOP:  # too few steps for its own clock
            assert losses[0] == whole[0] and not state["dp"].get("checked")
            continue
        assert whole == losses
        assert state["dp"]["pays"] is False and state["zero"]["pays"] is True
        assert state["dp"]["since"] == STOP and held == 0


def rolled_back(folder: str, job: Job) -> list[int]:
    """Return the steps whose starts are timed once a decided run loads a comparing one's state."""
    with clock(*NATIVE):
        engine = make_engine(job)
    channels = channels_of(engine)
    assert channels is not None
    with timed(channels, {"dp": (0.3, 0.1), "zero": (0.3, 0.4)}):
        for step in range(STOP + 2):
            if step == FIRST + 1:
                engine.save_checkpoint(folder, tag="x")
            train_step(engine, job, step)
        assert not channels.verdicts.may_compare
        hooks = engine.module._forward_pre_hooks
        decided = len(hooks)
        for _ in range(2):
            engine.load_checkpoint(folder, tag="x")
        assert len(hooks) == decided + 1, "a load adds no second clock"
        train_step(engine, job, FIRST + 1)
    assert channels.verdicts.recheck is not None
    engine.destroy()
    return sorted(channels.verdicts.recheck._starts)


def test_a_decided_run_that_loads_a_comparing_one_times_its_steps_alone(
    module_ranks: RunRanks, tmp_path: Path
) -> None:
    job = Job(1, block={**BLOCK, "remember": False})
    assert module_ranks(2, rolled_back, str(tmp_path), job) == [[FIRST + 1]] * 2


def piped(block: dict[str, Any], change: bool) -> Any:
    """Run two stages; ``change``: force the comparison to pick the other mode."""
    job = pipe_trainer.Job(steps=16, tied=True, zero=1, bf16=True, block=block)
    finding = recheck.StepComparison(1.0, 1.0, change)
    with (
        clock(*CODED),
        patch.object(recheck.Recheck, "_judged", lambda *_: finding),
        patch.object(recheck.Recheck, "end_early", lambda *_: None),
    ):
        (outcome,) = pipe_trainer.run([job])
    return outcome


@pytest.mark.parametrize("change", by_day([False, True], [True]))
def test_stages_of_a_pipeline_change_together(stages: RankPool, change: bool) -> None:
    """Both ends of a message must use the same mode in every step, or the test hangs."""
    eight = {"codec": "blockint", "bits": 8}
    always = {"pp": eight, "dp": eight, "min_bytes": 0}
    auto = {**always, "pp": EIGHT, "dp": EIGHT}
    compared, compressed = stages.run(piped, auto, change), stages.run(piped, always, change)
    for mine_of, other in zip(compared, compressed, strict=True):
        for way in ("forward", "backward"):
            (mine,) = [row for row in mine_of.messages if row[:2] == ("pp", way)] or [None]
            (theirs,) = [row for row in other.messages if row[:2] == ("pp", way)] or [None]
            if mine is None or theirs is None:
                continue
            assert mine[2:4] == theirs[2:4], "as many messages, of as many bytes"
            assert theirs[4] < mine[4] < mine[3], "some of them native, some not"
            native = (mine[4] - theirs[4]) / (theirs[3] - theirs[4])
            steps = 1 + 1 + 4 + (3 if change else 0)  # the first, rehearsed, compared, and after
            assert native == pytest.approx(steps / 16, abs=0.01)
        assert mine_of.losses[-1] == pytest.approx(other.losses[-1], rel=0.05)


def test_no_steps_are_compared_where_memory_is_short(module_ranks: RunRanks) -> None:
    """Native steps would run out of memory; the other dimension is still compared."""
    job = Job(1, steps=FIRST + 2, block=BLOCK)
    for result in module_ranks(2, cramped, job):
        short, begun = result["told"]
        assert short.startswith("dp: stays native: to compare steps, 22.1 kB for error feedback")
        assert begun.startswith("zero: a trial times messages alone")
        assert result["modes"][-1] == [False, True]


def cramped(job: Job) -> dict[str, Any]:
    """Run with one rank short of memory."""
    with patch("hybridcomp.channels.online_tuner.has_room", lambda nbytes, device: False):
        return trained(job, NATIVE, {})
