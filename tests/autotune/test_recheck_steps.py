"""``when: auto`` compares steps after a close trial, and changes once, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from hybridcomp.autotune import recheck, trials
from hybridcomp.channels import Channels, channels_of, online_tuner
from tests.ranks import RankPool
from tests.stand_ins.link_clock import clock

if find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

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
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def stages() -> Iterator[RankPool]:
    """Run in separate ranks: DeepSpeed keeps a pipeline's grid for the rest of a process."""
    with RankPool(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


@contextmanager
def timed(channels: Channels, costs: Costs) -> Iterator[list[str]]:
    """Fake the clock: a step takes a second plus the cost of each dimension; yields the log.

    A minute passes between steps.
    """
    seconds, told = 0.0, []
    close: Callable[..., list[str]] = channels.close_step

    def closed(*args: Any) -> list[str]:
        nonlocal seconds
        step = channels.step - 1
        seconds += 1.0 + dist.get_rank() * 0.01
        for name, (native_s, coded_s) in costs.items():
            seconds += native_s if channels.verdicts.native(name, step) else coded_s  # type: ignore[arg-type]
        told.extend(found := close(*args))
        seconds += 60.0 + channels.step
        return found

    with (
        patch.object(recheck, "now", lambda: seconds),
        patch.object(channels, "close_step", closed),
    ):
        yield told


def trained(job: Job, trial: tuple[float, float], costs: Costs) -> dict[str, Any]:
    with clock(*trial):
        engine = make_engine(job)
    channels = channels_of(engine)
    assert channels is not None
    found: dict[str, Any] = {"losses": [], "modes": [], "held": [], "codecs": []}
    found["gathers"] = set()
    with timed(channels, costs) as found["told"]:
        for step in range(job.steps):
            channels.ledger.restart()
            found["modes"].append([not channels.verdicts.native(n, step) for n in ("dp", "zero")])
            found["losses"].append(train_step(engine, job, step))
            found["held"].append(channels.residuals.norm())
            found["codecs"].append(list(channels.ledger.used.get(("dp", "forward"), ())))
            found["gathers"].update(channels.ledger.used.get(("zero", "forward"), ()))
    rows = channels.ledger.rows(channels.ledger.interval)
    found["since"] = {
        name: (ways["forward"]["native_since"], ways["forward"]["encoded_since"])
        for name, ways in rows.items()
    }
    found["digests"] = digests(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_native_by_its_trial_and_faster_encoded(pool: RankPool, stage: int) -> None:
    job = Job(stage, steps=STOP + 3, block=BLOCK)
    both = pool.run(trained, job, NATIVE, {"dp": (0.3, 0.1), "zero": (0.3, 0.4)})
    for found in both:
        assert found["modes"][:FIRST] == [[False, False]] * FIRST
        assert found["modes"][FIRST : FIRST + 2] == [[False, False], [True, True]]
        window = found["modes"][FIRST + 2 : STOP]
        assert all(window.count([dp, zero]) == 2 for dp in (False, True) for zero in (False, True))
        assert found["modes"][STOP:] == [[True, False]] * 3
        assert found["since"] == {"dp": (None, STOP), "zero": (0, None)}
        begun, dp, zero = found["told"]
        assert begun.startswith(
            "dp, zero: a trial times messages alone, so "
            f"steps {FIRST} to {STOP - 1}, or {STOP + 7} where it is close, run in both ways"
        )
        assert dp.startswith("dp: steps took ") and f"compressed from step {STOP} on" in dp
        assert zero.endswith("(compression.zero.when: auto): stays native")
    assert both[0]["digests"] == both[1]["digests"]


def test_encoded_by_its_trial_and_faster_natively(pool: RankPool) -> None:
    """The residuals are sent losslessly first; then steps equal upstream's."""
    job = Job(1, steps=STOP + 3, block=BLOCK)
    for found in pool.run(trained, job, CODED, {"dp": (0.1, 0.3), "zero": (0.1, 0.3)}):
        assert found["modes"][STOP:] == [[False, False]] * 3
        assert found["since"] == {"dp": (STOP, None), "zero": (STOP, None)}
        assert all(held > 0 for held in found["held"][:STOP]), "kept in native steps between"
        assert found["codecs"][STOP - 1] == ["blockint(bits=4)"]
        assert found["codecs"][STOP] == ["expcode()"] and found["held"][STOP] == 0
        assert found["codecs"][STOP + 1] == []


def test_a_second_round_where_the_first_was_unclear(pool: RankPool) -> None:
    """0.8 % of a step is below the margin for a change and above the noise of four pairs."""
    job = Job(1, steps=STOP + 8 + 1, block={**BLOCK, "zero": "none"})
    for found in pool.run(trained, job, CODED, {"dp": (0.29, 0.30)}):
        assert [dp for dp, _ in found["modes"][STOP:]] == [i & 1 == 1 for i in range(8)] + [True]
        assert len(found["told"]) == 2 and found["told"][1].endswith("stays compressed")


def test_deltas_go_on_between_native_steps(pool: RankPool) -> None:
    """An encoded step after a native step sends deltas; a full send would distort its time."""
    zero = {**EIGHT, "bits": 4, "delta": True}
    job = Job(1, steps=STOP + 1, block={**BLOCK, "dp": "none", "zero": zero})
    for found in pool.run(trained, job, NATIVE, {"zero": (0.1, 0.15)}):
        assert [mode for _, mode in found["modes"][-9:]] == [i & 1 == 1 for i in range(8)] + [False]


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


@pytest.mark.parametrize("pays", [True, False])
def test_copies_in_nodes_are_weighed_by_their_steps(four: RankPool, pays: bool) -> None:
    """The copy outlasts native steps, so that every encoded step sends changes only."""
    block = {
        "zero": {"secondary": "exact", "when": "auto"}, "min_bytes": 0,
        "hierarchy": 2, "ledger": {"sample_every": 0},
    }  # fmt: skip
    costs = {"zero": (0.3, 0.1) if pays else (0.1, 0.3)}
    natively = four.run(with_copies, None, {})
    for plain, found in zip(natively, four.run(with_copies, block, costs), strict=True):
        assert found["digests"] == plain["digests"] and found["losses"] == plain["losses"]
        assert {spec for spec, _ in found["tried"]} == {"stepcode()"}
        modes = [zero for _, zero in found["modes"]]
        assert {True, False} == set(modes[FIRST:STOP]) and modes[STOP:] == [pays] * 4
        assert found["gathers"] == {"stepcode()"}, "never whole: DeepSpeed makes the first copy"


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


@pytest.mark.parametrize("stop", [STOP - 1, STOP, STOP + 1])
def test_a_run_that_is_continued_after_it_stays_as_it_was(
    pool: RankPool, tmp_path: Path, stop: int
) -> None:
    job = Job(1, steps=STOP + 4, block={**BLOCK, "ledger": {"sample_every": 0}})
    costs = {"dp": (0.1, 0.3), "zero": (0.3, 0.1)}
    for whole, losses, state, held in pool.run(resumed, str(tmp_path), job, stop, costs):
        if stop < STOP:  # too few steps for its own clock
            assert losses[0] == whole[0] and not state["dp"].get("checked")
            continue
        assert whole == losses
        assert state["dp"]["pays"] is False and state["zero"]["pays"] is True
        assert state["dp"]["since"] == STOP and held == 0


@pytest.mark.parametrize(("trial", "coded"), [(CODED, True), (NATIVE, False)])
def test_a_verdict_that_steps_bear_out_at_once_costs_few(
    pool: RankPool, trial: tuple[float, float], coded: bool
) -> None:
    """The other mode is far slower in the first pair, which ends the comparison."""
    costs = {"dp": (0.7, 0.1) if coded else (0.1, 0.7)}
    job = Job(1, steps=FIRST + 6, block={**BLOCK, "zero": "none"})
    for found in pool.run(trained, job, trial, costs):
        dp = [mode for mode, _ in found["modes"]]
        assert dp == [coded] * FIRST + [False, True] * 2 + [coded] * 2
        assert found["told"][1].endswith(f"stays {'compressed' if coded else 'native'}")


def test_less_takes_more_pairs(pool: RankPool) -> None:
    """0.2 of a step needs two pairs, each of which may show half of it."""
    job = Job(1, steps=FIRST + 7, block={**BLOCK, "zero": "none"})
    for found in pool.run(trained, job, CODED, {"dp": (0.4, 0.15)}):
        assert [mode for mode, _ in found["modes"]][FIRST:] == [False, True] * 3 + [True]


def test_a_trial_that_encoding_won_is_held_against_steps(pool: RankPool) -> None:
    """Encoding is twice as fast alone, but slower in the step, where computation hides the wire."""
    job = Job(1, steps=STOP + 1, block={**BLOCK, "zero": "none"})
    for found in pool.run(trained, job, (0.03, 0.01), {"dp": (0.1, 0.2)}):
        assert not found["modes"][-1][0] and "native from step" in found["told"][1]


def test_a_clear_trial_needs_no_steps(pool: RankPool) -> None:
    job = Job(1, steps=STOP, block=BLOCK)
    (found, _) = pool.run(trained, job, (0.01, 0.02), {"dp": (0.3, 0.1), "zero": (0.3, 0.1)})
    assert found["told"] == [] and found["modes"] == [[False, False]] * STOP
    plain = replace(job, block={"dp": "none", "zero": "none"})
    (native, _) = pool.run(trained, plain, (0.01, 0.02), {})
    assert native["losses"] == found["losses"] and native["digests"] == found["digests"]


def piped(block: dict[str, Any], change: bool) -> Any:
    """Run two stages; ``change``: force the comparison to pick the other mode."""
    job = pipe_trainer.Job(steps=16, tied=True, zero=1, bf16=True, block=block)
    found = recheck.StepComparison(1.0, 1.0, change)
    with (
        clock(*CODED),
        patch.object(recheck.Recheck, "_judged", lambda *_: found),
        patch.object(recheck.Recheck, "end_early", lambda *_: None),
    ):
        (outcome,) = pipe_trainer.run([job])
    return outcome


@pytest.mark.parametrize("change", [False, True])
def test_stages_of_a_pipeline_change_together(stages: RankPool, change: bool) -> None:
    """Both ends of a message must use the same mode in every step, or the test hangs."""
    eight = {"codec": "blockint", "bits": 8}
    always = {"pp": eight, "dp": eight, "min_bytes": 0}
    auto = {**always, "pp": EIGHT, "dp": EIGHT}
    compared, compressed = stages.run(piped, auto, change), stages.run(piped, always, change)
    for one, other in zip(compared, compressed, strict=True):
        for way in ("forward", "backward"):
            (mine,) = [row for row in one.messages if row[:2] == ("pp", way)] or [None]
            (theirs,) = [row for row in other.messages if row[:2] == ("pp", way)] or [None]
            if mine is None or theirs is None:
                continue
            assert mine[2:4] == theirs[2:4], "as many messages, of as many bytes"
            assert theirs[4] < mine[4] < mine[3], "some of them native, some not"
            native = (mine[4] - theirs[4]) / (theirs[3] - theirs[4])
            steps = 1 + 1 + 4 + (3 if change else 0)  # the first, rehearsed, compared, and after
            assert native == pytest.approx(steps / 16, abs=0.01)
        assert one.losses[-1] == pytest.approx(other.losses[-1], rel=0.05)


def test_no_steps_are_compared_where_memory_is_short(pool: RankPool) -> None:
    """Native steps would run out of memory; the other dimension is still compared."""
    job = Job(1, steps=FIRST + 2, block=BLOCK)
    for found in pool.run(cramped, job):
        short, begun = found["told"]
        assert short.startswith("dp: stays native: to compare steps, 22.1 kB for error feedback")
        assert begun.startswith("zero: a trial times messages alone")
        assert found["modes"][-1] == [False, True]


def cramped(job: Job) -> dict[str, Any]:
    """Run with one rank short of memory."""
    with patch("hybridcomp.channels.online_tuner.has_room", lambda nbytes, device: False):
        return trained(job, NATIVE, {})
