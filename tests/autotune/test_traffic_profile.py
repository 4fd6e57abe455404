"""``when: auto`` of tp and pp: native until a step has recorded the traffic, then decided."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hybridcomp.autotune import trials
from hybridcomp.autotune.trials import PlannedMessage
from hybridcomp.channels import Channels, channels_of, online_tuner
from hybridcomp.config import CompressionConfig
from tests.ranks import RunRanks
from tests.selection import by_day
from tests.stand_ins.link_clock import clock

if find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

from tests.training import in_turn, pipe_trainer

EIGHT = {"codec": "blockint", "bits": 8, "when": "auto"}
BLOCK = {"tp": EIGHT, "pp": {**EIGHT, "backward": {"bits": 4}}, "min_bytes": 0}
CPU, BF16 = torch.device("cpu"), torch.bfloat16
SLOW, FAST = (0.09, 0.01), (0.01, 0.02)


def send_messages(channels: Channels, tensor: Any, odd_rank: int | None = None) -> list[bool]:
    """Send the messages of rank r (two tensor ranks, two stages); return if they are native."""
    rank = dist.get_rank()
    numel = 900 if rank == odd_rank else 1000
    codecs = [channels["tp"].codec(numel, BF16, tensor, way) for way in ("forward", "backward")]
    codecs += [
        channels["tp"].codec(7, BF16, tensor) for _ in range(3)
    ]  # many messages of few bytes
    first, second = rank % 2, rank % 2 + 2
    codecs.append(channels["pp"].codec(500, BF16, None, "forward", (first, second)))
    codecs.append(channels["pp"].codec(400, BF16, None, "backward", (second, first)))
    return [codec is None for codec in codecs]


def two_steps(times: tuple[float, float], odd_rank: int | None) -> dict[str, Any]:
    """Run two steps; return timings, log and decisions."""
    channels = Channels(CompressionConfig.parse(BLOCK))
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    tensor = groups[dist.get_rank() // 2]
    planned: list[tuple[Any, ...]] = []

    def kept(plan: list[PlannedMessage], device: torch.device) -> Any:
        planned.extend((message.between, message.numel, message.codec.spec) for message in plan)
        return trials.messages(plan, device)

    outcome: dict[str, Any] = {"native": [], "told": [], "planned": planned}
    with clock(*times), patch.object(online_tuner, "messages", kept):
        for step in (1, 2):
            outcome["native"].append(send_messages(channels, tensor, odd_rank))
            channels.step = step
            outcome["told"].append(channels.close_step(False, CPU))
    outcome["native"].append(send_messages(channels, tensor))
    outcome["verdicts"] = channels.verdicts.state()
    outcome["since"] = dict(channels.ledger.native_since)
    assert not any(entry.messages for entry in channels.ledger.interval.values()), "no traffic"
    dist.destroy_process_group(tensor)
    return outcome


@pytest.mark.parametrize(("times", "pays"), [(SLOW, True), (FAST, False)])
def test_the_first_step_is_native_and_is_what_is_timed(
    module_ranks: RunRanks, times: tuple[float, float], pays: bool
) -> None:
    for rank, result in enumerate(module_ranks(4, two_steps, times, None)):
        first, second, third = result["native"]
        assert all(first) and second == third == [not pays] * len(first)
        verdicts = {name: (v["pays"], v["nbytes"]) for name, v in result["verdicts"].items()}
        assert verdicts == {"tp": (pays, 2000), "pp": (pays, 1000)}
        assert result["since"] == ({} if pays else {"tp": 0, "pp": 0})
        assert len(result["told"][0]) == (2 if pays else 3) and result["told"][1] == []
        assert "0.002 MB take" in result["told"][0][0]
        down, up = (rank % 2, rank % 2 + 2), (rank % 2 + 2, rank % 2)
        eight = "blockint(bits=8)"
        planned = [(None, 1000, eight)] * 2 + [(down, 500, eight), (up, 400, "blockint(bits=4)")]
        assert sorted(result["planned"], key=str) == sorted(planned, key=str)


def test_what_a_group_does_not_agree_on_is_not_timed(module_ranks: RunRanks) -> None:
    """A trial would hang. The other group runs trials, and all ranks follow its decision."""
    for rank, result in enumerate(module_ranks(4, two_steps, FAST, 1)):
        collectives = [numel for hop, numel, _ in result["planned"] if hop is None]
        assert collectives == ([] if rank < 2 else [1000, 1000])
        assert not result["verdicts"]["tp"]["pays"]


def two_steps_kept(times: tuple[float, float], odd_rank: int | None, folder: str) -> Any:
    """Run two steps, and those until rank 0 has written the results."""
    ends: list[Channels] = []
    made = Channels.__init__

    def noted(channels: Channels, config: CompressionConfig) -> None:
        made(channels, config)
        ends.append(channels)

    with patch.dict(os.environ, HYBRIDCOMP_CACHE=folder), patch.object(Channels, "__init__", noted):
        outcome = two_steps(times, odd_rank)
        (channels,) = ends
        for step in range(3, 13):
            channels.tuner.open_step(CPU)
            channels.step = step
            channels.close_step(False, CPU)
    return outcome


def test_the_next_run_takes_over_what_is_sent_alike(module_ranks: RunRanks, tmp_path: Path) -> None:
    """The first step is native and shows that the messages are the same."""
    module_ranks(4, two_steps_kept, SLOW, None, str(tmp_path))
    for result in module_ranks(4, two_steps_kept, FAST, None, str(tmp_path)):
        assert not result["planned"], "no trial"
        first, second, _ = result["native"]
        assert all(first) and not any(second)
        assert ["on the same machines" in line for line in result["told"][0]] == [True, True]
    for result in module_ranks(
        4, two_steps_kept, FAST, 1, str(tmp_path)
    ):  # rank 1 sends another size
        assert not result["verdicts"]["tp"]["pays"] and result["verdicts"]["pp"]["pays"]


def only_odd() -> tuple[Any, ...]:
    channels = Channels(CompressionConfig.parse({"tp": EIGHT, "min_bytes": 0}))
    channels["tp"].codec(10 + dist.get_rank(), BF16, None)
    channels.step = 1
    said = channels.close_step(False, CPU)
    return said, channels["tp"].codec(10, BF16, None) is None


def test_where_nothing_can_be_timed_it_is_said_and_compressed(module_ranks: RunRanks) -> None:
    for said, native in module_ranks(2, only_odd):
        assert len(said) == 1 and "tp: compressed, not timed" in said[0] and not native


def late() -> list[int]:
    """Run to a step in which ranks exchange profiles: none of steps 0 to 5 does."""
    block = {"tp": EIGHT, "min_bytes": 0, "start_step": 2}
    channels = Channels(CompressionConfig.parse(block))
    looked = []
    plans = channels.seen.plans

    def counted() -> Any:
        looked.append(channels.step)
        return plans()

    with clock(*FAST), patch.object(channels.seen, "plans", counted):
        for step in range(1, 12):
            if step > 6:
                assert channels["tp"].codec(10, BF16, None) is None
            channels.step = step
            channels.close_step(False, CPU)
    assert channels.verdicts.native("tp", channels.step) and not channels.seen.waiting
    return looked


def test_ranks_look_for_messages_more_and_more_rarely(module_ranks: RunRanks) -> None:
    assert module_ranks(2, late) == [[3, 4, 6, 10]] * 2


PIPE = {"pp": EIGHT, "min_bytes": 0}


def trained(times: tuple[float, float], block: dict[str, Any]) -> Any:
    job = pipe_trainer.Job(steps=6, block=block)
    with clock(*times):
        (outcome,) = pipe_trainer.run([job])
    return outcome


def test_pipeline_of_deepspeed(module_ranks: RunRanks) -> None:
    """A fast link gives native bits, a slow link compresses from step 1 on."""
    off, on = module_ranks(2, trained, FAST, PIPE), module_ranks(2, trained, SLOW, PIPE)
    plain = module_ranks(2, trained, FAST, {"pp": "none"})
    always = module_ranks(
        2, trained, FAST, {**PIPE, "pp": {"codec": "blockint", "bits": 8}, "start_step": 1}
    )
    for rank in range(2):
        native, coded, *same = (
            (run[rank].losses, run[rank].parameters, run[rank].messages)
            for run in (off, on, plain, always)
        )
        assert [native, coded] == same and native[2] != coded[2]


TIED = pipe_trainer.Job(steps=4, tied=True, bf16=True)


def tied(times: tuple[float, float], dp: Any) -> Any:
    with clock(*times):
        (outcome,) = pipe_trainer.run([replace(TIED, block={"dp": dp, "min_bytes": 0})])
    return outcome


def test_tied_weights_of_a_fast_link_are_summed_in_the_order_of_upstream(
    module_ranks: RunRanks,
) -> None:
    """Tied weights are summed after the replicas' reduction only under lossy compression."""
    off, plain = module_ranks(4, tied, FAST, EIGHT), module_ranks(4, tied, FAST, "none")
    on = module_ranks(4, tied, SLOW, EIGHT)
    for rank in range(4):
        assert off[rank].losses == plain[rank].losses != on[rank].losses
        assert off[rank].parameters == plain[rank].parameters
        assert off[rank].messages == plain[rank].messages


def resumed(
    folder: str, first: tuple[float, float], second: tuple[float, float]
) -> tuple[list[float], list[float], bool]:
    """Run three steps, save, three more; then three after a restart on a link of another speed."""
    import deepspeed

    import hybridcomp

    in_turn.start_deepspeed()
    hybridcomp.install()
    job = pipe_trainer.Job(block=PIPE)

    def engine_of() -> Any:
        torch.manual_seed(0)
        engine, *_ = deepspeed.initialize(
            model=pipe_trainer.build(job, []), config=pipe_trainer.ds_config(job, 1)
        )
        engine.has_bool_tensors = False
        return engine

    def steps(engine: Any, first_step: int) -> list[float]:
        data = pipe_trainer.batches(job, 0)
        for _ in range(first_step * job.micro_batches):
            next(data)
        return [float(engine.train_batch(data)) for _ in range(3)]

    with clock(*first):
        engine = engine_of()
        steps(engine, 0)
        engine.save_checkpoint(folder, tag="x")
        whole = steps(engine, 3)
    with clock(*second):
        again = engine_of()
        again.load_checkpoint(folder, tag="x")
        losses = steps(again, 3)
    channels = channels_of(again)
    assert channels is not None and not channels.seen.waiting
    return whole, losses, channels.verdicts.by_dimension["pp"].pays


@pytest.mark.parametrize(("first", "second"), by_day([(SLOW, FAST), (FAST, SLOW)], [(SLOW, FAST)]))
def test_a_resumed_pipeline_goes_on_as_it_was(
    module_ranks: RunRanks, tmp_path: Path, first: tuple[float, float], second: tuple[float, float]
) -> None:
    for whole, losses, pays in module_ranks(2, resumed, str(tmp_path), first, second):
        assert whole == losses and pays == (first == SLOW)


def test_the_state_is_json() -> None:
    channels = Channels(CompressionConfig.parse(BLOCK))
    stored = {"pays": False, "nbytes": 10, "native_s": 0.1, "coded_s": 0.2}
    said = channels.tuner.resume(json.loads(json.dumps({"pp": stored})))
    assert said == ["pp: native, as measured in the run that is continued"]
    assert channels.seen.waiting == ("tp",) and channels.verdicts.native("pp", channels.step)
    assert channels.ledger.native_since == {"pp": 0}
    assert channels.verdicts.state() == {"pp": stored}
    assert channels.verdicts.by_dimension["pp"].describe("pp").startswith("pp: 1e-05 MB")
