"""``when: auto`` of dp and zero: ranks agree, a fast link is native, restarts keep the decision."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hybridcomp.autotune import sum_trials, trials
from hybridcomp.autotune.verdicts import Decision, Verdicts, are_decisions
from hybridcomp.channels import Channel, Channels, StepTraffic, channels_of
from hybridcomp.codecs import make_codec
from hybridcomp.collectives import Group
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import ConfigError
from tests.ranks import RunRanks
from tests.selection import by_day
from tests.stand_ins.link_clock import clock

if find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

from hybridcomp.patches.ds import step_messages
from hybridcomp.session.engine_session import EngineSession
from tests.training.trainer import Job, Tiny, digests, make_engine, train_step

FEEDBACK = {"codec": "blockint", "bits": 4, "error_feedback": True, "when": "auto"}
EIGHT = {"codec": "blockint", "bits": 8, "when": "auto"}
BLOCK = {"dp": FEEDBACK, "zero": EIGHT, "min_bytes": 0}
CPU = torch.device("cpu")
LATE = Decision(False, 1024, 0.1, 0.2)
SLOW, FAST = (0.09, 0.01), (0.01, 0.02)


def weighed(
    times: list[tuple[float, float]], hierarchy: int | str, numel: int = 1 << 20
) -> tuple[dict[str, Any], list[str], list[int], list[bool]]:
    """Return decisions, log, sizes of trials, and whether messages are native."""
    channels = Channels(CompressionConfig.parse({**BLOCK, "hierarchy": hierarchy}))
    channels.place([tuple(range(dist.get_world_size()))])
    with clock(*times[dist.get_rank()]) as sizes:
        said = channels.tuner.run_autotune(None, torch.bfloat16, CPU, numel + dist.get_rank())
    assert not channels.ledger.interval["dp", "forward"].messages, "trials are no traffic"
    native = [channels[name].codec(1000, torch.bfloat16, None) is None for name in ("dp", "zero")]
    return channels.verdicts.state(), said, sizes, native


@pytest.mark.parametrize(
    ("times", "pays", "count"),
    [
        ([(0.02, 0.01), (0.02, 0.01)], True, 3),
        ([(0.01, 0.02), (0.01, 0.02)], False, 3),
        ([(0.02, 0.01), (0.02, 0.03)], False, 3),  # the slowest rank counts
        ([(0.02, 0.01), (0.05, 0.03)], True, 3),
        ([(0.02, 0.0195), (0.02, 0.0195)], False, 3),  # faster, but not by the margin
        ([(9.0, 1.0), (0.01, 0.01)], True, 1),  # a large message takes too long
    ],
)
def test_all_ranks_decide_alike(
    module_ranks: RunRanks, times: list[tuple[float, float]], pays: bool, count: int
) -> None:
    slowest = [max(pair[way] for pair in times) for way in (0, 1)]
    for state, said, sizes, native in module_ranks(2, weighed, times, "none"):
        for verdict in state.values():
            assert (verdict["native_s"], verdict["coded_s"]) == tuple(slowest)
            assert (verdict["pays"], verdict["nbytes"]) == (pays, 2 << (9 + count))
        assert list(state) == ["dp", "zero"] and native == [not pays] * 2
        assert sizes == [1 << (10 + index) for index in range(count)] * 2
        assert ("native for this run" in said[0]) != pays
        surely = not pays and slowest[1] >= 2 * slowest[0]  # no comparison of steps could change it
        assert ["nothing is compressed in this run" in text for text in said[2:]] == [True] * surely
        assert said[1].startswith("zero: ") and "(compression.zero.when: auto)" in said[1]


@pytest.mark.parametrize(("numel", "count"), [(1 << 12, 3), (1030, 2), (3, 1)])
def test_no_trial_is_larger_than_what_there_is(
    module_ranks: RunRanks, numel: int, count: int
) -> None:
    """If ranks of a group differ in numbers of values, the smallest counts."""
    for state, _, sizes, _ in module_ranks(2, weighed, [(0.02, 0.01)] * 2, "none", numel):
        assert sizes == [min(1 << (10 + index), numel) for index in range(count)] * 2
        assert state["dp"]["nbytes"] == 2 * numel


def test_two_levels_are_what_is_timed(module_ranks: RunRanks) -> None:
    for state, _, _, native in module_ranks(4, weighed, [(0.02, 0.01)] * 4, 2):
        assert state["dp"]["pays"] and native == [False, False]


def trained(job: Job, times: tuple[float, float]) -> tuple[Any, ...]:
    with clock(*times):
        engine = make_engine(job)
    losses = [train_step(engine, job, step) for step in range(job.steps)]
    channels = channels_of(engine)
    assert channels is not None
    rows = channels.ledger.rows(channels.ledger.interval)
    outcome = losses, digests(engine), rows, channels.residuals.nbytes
    engine.destroy()
    return outcome


@pytest.mark.parametrize("stage", by_day([0, 1, 2, 3], [3]))
def test_a_fast_link_makes_the_run_native(module_ranks: RunRanks, stage: int) -> None:
    """Bit for bit, without residuals; the ledger records the step of the decision."""
    job = Job(stage, steps=4, block=BLOCK if stage else {"dp": FEEDBACK, "min_bytes": 0})
    plain = {"dp": "none", "zero": "none"} if stage else {"dp": "none"}
    off = module_ranks(2, trained, job, (0.01, 0.02))
    on = module_ranks(2, trained, job, (0.09, 0.01))
    native = module_ranks(2, trained, replace(job, block=plain), (0.01, 0.02))
    for rank in range(2):
        losses, weights, rows, held = off[rank]
        assert (losses, weights) == native[rank][:2] != on[rank][:2]
        assert held == 0 < on[rank][3]
        for ways in rows.values():
            row = ways["forward"]
            assert row["native_messages"] == row["messages"] and row["native_since"] == 0
        assert on[rank][2]["dp"]["forward"]["native_since"] is None


class OverIntegers(nn.Module):
    """A model that begins with a frozen weight in integers, as a quantized base does."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False)
        self.trained = Tiny()


def measured_over_integers() -> list[str]:
    model = OverIntegers()
    job = Job(1, block=BLOCK)
    trained = [{"params": [one for one in model.parameters() if one.requires_grad]}]
    with clock(*SLOW):
        engine = make_engine(job, model, trained)
    channels = channels_of(engine)
    assert channels is not None
    engine.destroy()
    return sorted(channels.verdicts.by_dimension)


def test_a_base_of_integers_is_no_reason_to_measure_nothing(module_ranks: RunRanks) -> None:
    assert module_ranks(2, measured_over_integers) == [["dp", "zero"]] * 2


def dtypes_of(job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the dtype in which each dimension is measured, and that of most values it sends."""
    measured: dict[str, Any] = {}
    sent: dict[str, Counter[torch.dtype]] = {"dp": Counter(), "zero": Counter()}
    measure, run = EngineSession.measure, Channel.run

    def noting(self: Any, group: Any, dtype: Any, numel: Any, own: Any, only: Any) -> None:
        measured.update(dict.fromkeys(only, dtype))
        measure(self, group, dtype, numel, own, only)

    def counting(self: Any, message: Any, **ways: Any) -> Any:
        sent[self.dimension][message.dtype] += message.numel
        return run(self, message, **ways)

    autocast = patch("deepspeed.runtime.torch_autocast.TORCH_AUTOCAST_INITIALIZED", False)
    seen = patch.object(EngineSession, "measure", noting), patch.object(Channel, "run", counting)
    with autocast, seen[0], seen[1], clock(*SLOW):
        engine = make_engine(job)
        train_step(engine, job, 0)
    engine.destroy()
    return measured, {name: max(found, key=found.__getitem__) for name, found in sent.items()}


@pytest.mark.parametrize(
    "job",
    [Job(1, "bf16", ds_json={"communication_data_type": "fp32"}),
     Job(3, ds_json={"torch_autocast": {
         "enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear"],
     }})],
    ids=["fp32 sums", "autocast"],
)  # fmt: skip
def test_messages_are_measured_in_their_dtype(module_ranks: RunRanks, job: Job) -> None:
    for measured, sent in module_ranks(2, dtypes_of, replace(job, block=BLOCK)):
        assert measured == sent


def resumed(
    folder: str, first: tuple[float, float], second: tuple[float, float], before: dict[str, Any]
) -> tuple[Any, ...]:
    """Run three steps with block ``before``, save, three more; then three more after a restart."""
    job = Job(1, steps=3, block=before)
    with clock(*first):
        engine = make_engine(job)
    for step in range(3):
        train_step(engine, job, step)
    engine.save_checkpoint(folder, tag="x")
    whole = [train_step(engine, job, step) for step in range(3, 6)]
    with clock(*second):
        again = make_engine(replace(job, block=BLOCK))
    again.load_checkpoint(folder, tag="x")
    losses = [train_step(again, job, step) for step in range(3, 6)]
    channels = channels_of(again)
    assert channels is not None
    verdicts = {name: verdict.pays for name, verdict in channels.verdicts.by_dimension.items()}
    return whole, losses, verdicts, channels.ledger.native_since, channels.residuals.nbytes


@pytest.mark.parametrize(("first", "second"), by_day([(SLOW, FAST), (FAST, SLOW)], [(SLOW, FAST)]))
def test_a_resumed_run_goes_on_as_it_was(
    module_ranks: RunRanks, tmp_path: Path, first: tuple[float, float], second: tuple[float, float]
) -> None:
    pays = first == SLOW
    for whole, losses, verdicts, since, held in module_ranks(
        2, resumed, str(tmp_path), first, second, BLOCK
    ):
        assert whole == losses
        assert verdicts == {"dp": pays, "zero": pays}
        assert since == ({} if pays else {"dp": 0, "zero": 0})
        assert (held > 0) == pays


def test_residuals_that_nobody_will_send_are_dropped(
    module_ranks: RunRanks, tmp_path: Path
) -> None:
    """The first run always compresses; the resumed run is native."""
    always = {
        name: {**BLOCK[name], "when": "always"}  # type: ignore[dict-item]
        for name in ("dp", "zero")
    }
    outcomes = module_ranks(2, resumed, str(tmp_path), SLOW, FAST, {**always, "min_bytes": 0})
    for _, losses, verdicts, _, held in outcomes:
        assert len(losses) == 3 and verdicts == {"dp": False, "zero": False} and held == 0


def test_what_changed_is_told() -> None:
    verdicts = Verdicts()
    verdicts.by_dimension["dp"] = Decision(False, 16 << 20, 0.01, 0.02)
    stored = Decision(True, 16 << 20, 0.3, 0.1)
    assert verdicts.restore({}) == [] and verdicts.native("dp", 0)
    (sentence,) = verdicts.restore({"dp": vars(stored)})
    assert sentence.startswith("dp: stays compressed, as in the run that is continued")
    assert (
        "16.8 MB now takes 20.0 ms and native 10.0 ms" in sentence and '"codec": "none"' in sentence
    )
    assert verdicts.by_dimension["dp"] == stored and not verdicts.native("dp", 0)


def unmeasured() -> str:
    channels = Channels(CompressionConfig.parse(BLOCK))
    assert channels["tp"].codec(10, torch.float32, None) is None
    with pytest.raises(ConfigError) as error:
        channels["dp"].codec(10, torch.float32, None)
    return str(error.value)


def test_what_was_not_measured_is_an_error(module_ranks: RunRanks) -> None:
    for said in module_ranks(2, unmeasured):
        assert "compression.dp.when" in said and 'write "always"' in said


def foretold(stage: int, persistent: int) -> tuple[Any, ...]:
    """Return the predicted traffic of a step, and the message sizes of the third step."""
    zero = {"reduce_bucket_size": 2000, "stage3_prefetch_bucket_size": 1500,
            "stage3_param_persistence_threshold": persistent}  # fmt: skip
    job = Job(
        stage, "bf16", steps=3, zero=zero if stage else {}, block={"dp": "none", "min_bytes": 0}
    )
    engine = make_engine(job)
    known = step_messages.sent(engine)
    seen: dict[str, list[int]] = {"dp": [], "zero": []}
    choose = Channel.codec

    def codec(self: Any, numel: int, *args: Any) -> Any:
        seen[self.dimension].append(numel)
        return choose(self, numel, *args)

    for step in range(3):
        seen = {"dp": [], "zero": []}
        with patch.object(Channel, "codec", codec):
            train_step(engine, job, step)
    engine.destroy()
    return {name: sent.numels for name, sent in known.items()}, seen


@pytest.mark.parametrize("stage", by_day([0, 1, 2, 3], [1, 3]))
def test_what_is_said_to_be_sent_is_sent(module_ranks: RunRanks, stage: int) -> None:
    for known, seen in module_ranks(2, foretold, stage, 0):
        assert sorted(known["dp"]) == pytest.approx(sorted(seen["dp"]), rel=1e-3)
        assert sum(known.get("zero", ())) == pytest.approx(sum(seen["zero"]), rel=1e-3)
        assert max(known.get("zero", (0,))) * 2 >= max(seen["zero"], default=0)


def weighed_whole(times: tuple[float, float], odd_rank: int | None) -> tuple[Any, ...]:
    """Run with known message sizes; ``odd_rank`` has other sizes."""
    channels = Channels(CompressionConfig.parse({**BLOCK, "hierarchy": "none"}))
    numels = (2000, 900) if dist.get_rank() == odd_rank else (2000, 901)
    sent: dict[Any, StepTraffic] = {
        "dp": StepTraffic(numels, "own"),
        "zero": StepTraffic(numels, "gather", True),
    }
    with clock(*times) as sizes:
        said = channels.tuner.run_autotune(None, torch.bfloat16, CPU, 5000, sent)
    scattered = StepTraffic((2000, 7, 1), "scatter")
    with clock(*times):
        runs = sum_trials.reductions(
            make_codec("blockint", bits=8),
            32,
            trials.TrialGroup(Group.of(None), torch.bfloat16, CPU),
        )
        for run in runs(scattered):
            run()
    return channels.verdicts.by_dimension, said, sizes


def test_all_messages_of_a_step_are_timed_together(module_ranks: RunRanks) -> None:
    for verdicts, said, sizes in module_ranks(2, weighed_whole, (0.02, 0.01), None):
        assert sizes == [1024, 2000, 2901] * 2
        assert {(v.nbytes, v.messages, v.of) for v in verdicts.values()} == {(5802, 2, 0)}
        assert said[0].startswith("dp: 0.0058 MB in 2 messages take 20.0 ms natively")


def test_messages_that_ranks_see_differently_are_not_sent(module_ranks: RunRanks) -> None:
    """Ranks would wait for each other forever."""
    for verdicts, _, sizes in module_ranks(2, weighed_whole, (0.02, 0.01), 1):
        assert sizes == [1024, 2048, 4096] * 2
        assert {verdict.messages for verdict in verdicts.values()} == {1}


def test_what_there_is_no_time_for_is_said(module_ranks: RunRanks) -> None:
    """Trials of both messages would exceed the time, or no time is left."""
    for times, last in (((0.12, 0.11), [1484]), ((0.4, 0.25), [])):
        for verdicts, said, sizes in module_ranks(2, weighed_whole, times, None):
            assert sizes == [1024, *last] * 2
            nbytes = 2 * sizes[-1]
            assert {(v.nbytes, v.messages, v.of) for v in verdicts.values()} == {(nbytes, 1, 5802)}
            assert said[1].startswith(f"zero: {nbytes / 1e6:.3g} MB (of 0.0058 MB a step) take ")
            gains = [verdict.gain_s for verdict in verdicts.values()]
            assert gains == pytest.approx([(times[0] - times[1]) * 5802 / nbytes] * 2)


def test_a_link_that_is_surely_slow_is_not_waited_for(module_ranks: RunRanks) -> None:
    """If encoding a small message is three times as fast, larger trials are skipped."""
    for verdicts, _, sizes in module_ranks(2, weighed_whole, (0.04, 0.01), None):
        assert sizes == [1024] * 2 and all(verdict.pays for verdict in verdicts.values())


def left_out() -> tuple[Any, ...]:
    """Use the preset in a job without gathers or layers to measure."""
    channels = Channels(CompressionConfig.parse({"preset": "recommended", "min_bytes": 0}))
    channels.leave_out({"zero", "tp", "pp"})
    with clock(*FAST):
        said = channels.tuner.run_autotune(None, torch.bfloat16, CPU, 5000)
    codec = channels["dp"].codec(1000, torch.bfloat16, None)
    with clock(*FAST):
        engine = make_engine(Job(0, block={"preset": "recommended", "min_bytes": 0}))
    of_engine = channels_of(engine)
    assert of_engine is not None
    engine.destroy()
    return said, codec, [(c.seen.waiting, list(c.verdicts.by_dimension), c.absent)
                         for c in (channels, of_engine)]  # fmt: skip


def test_the_preset_measures_what_the_job_has(module_ranks: RunRanks) -> None:
    for said, codec, both in module_ranks(2, left_out):
        assert codec is None
        assert len(said) == 1 and "native for this run" in said[0]
        for waiting, judged, absent in both:
            assert waiting == () and judged == ["dp"] and absent >= {"zero", "tp", "pp"}


def preset_unmeasured() -> tuple[Any, ...]:
    channels = Channels(CompressionConfig.parse({"preset": "recommended", "min_bytes": 0}))
    codec = channels["dp"].codec(1000, torch.bfloat16, None)
    channels.step = 1
    return codec, channels.close_step(False, CPU)


def test_a_preset_that_cannot_be_measured_compresses_and_says_so(module_ranks: RunRanks) -> None:
    for codec, said in module_ranks(2, preset_unmeasured):
        assert codec is not None
        assert [line for line in said if line.startswith("dp, zero: compressed, not timed")]


def test_a_part_of_what_is_sent() -> None:
    whole = StepTraffic((5, 6, 7), "sum")
    assert [whole.cut(most).numels for most in (100, 18, 17, 11, 5, 2)] == [
        (5, 6, 7), (5, 6, 7), (5, 6), (5, 6), (5,), (2,),
    ]  # fmt: skip


def test_a_state_of_another_form_is_refused() -> None:
    verdicts = Verdicts()
    verdicts.by_dimension["dp"] = Decision(True, 1024, 0.2, 0.1, checked=True, gain_s=0.1)
    (sound,) = verdicts.state().values()
    assert are_decisions({"dp": sound}) and are_decisions({})
    assert are_decisions({"dp": asdict(LATE)})
    for bad in ({"of_later": 1}, {"pays": "yes"}, {"nbytes": None}, {"native_s": "0.2"}):
        assert not are_decisions({"dp": sound | bad}), bad
    assert not are_decisions([]) and not are_decisions({"dp": None})
    assert not are_decisions({"dp": {"pays": True}})
