"""Bits per parameter between nodes: as in README's table, and for methods that send less."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from doc_pages import bits
from hybridcomp.config import CompressionConfig
from hybridcomp.tools.plan import bits_between
from hybridcomp.tools.plan.bits_between import JobTraffic
from hybridcomp.tools.plan.choices import Choices
from hybridcomp.tools.plan.cost.job import PlannedJob
from hybridcomp.tools.plan.cost.predict import predicted
from hybridcomp.tools.plan.cost.work import work_of
from hybridcomp.tools.plan.layout import Layout
from hybridcomp.tools.plan.models.decoder import Decoder
from hybridcomp.tools.plan.models.frozen import AdaptedModel
from hybridcomp.tools.plan.request import Batch, SearchLimits
from tests.tools.plan.search.test_copies import machines

RECOMMENDED = CompressionConfig.parse({"preset": "recommended"})
FP32 = torch.float32
JOB: dict[str, Any] = {
    "bf16": {"enabled": True}, "zero_optimization": {"stage": 3},
    "train_micro_batch_size_per_gpu": 1,
}  # fmt: skip
#: job of README's table -> the planner's
SAME = {
    "zero0": JobTraffic(0), "zero1": JobTraffic(1), "zero3_twice": JobTraffic(3),
    "hpz": JobTraffic(3, copy="native"), "ddp": JobTraffic(0, FP32, FP32),
    "fsdp2": JobTraffic(3, summed=FP32), "hsdp_bf16": JobTraffic(3, shards_in_node=True),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_figures_are_those_of_the_table(name: str) -> None:
    job, codecs = bits.JOBS[name], RECOMMENDED.codecs()
    dp, zero = codecs["dp", "forward"], codecs["zero", "forward"]
    assert SAME[name].native() == pytest.approx(bits.total(job.today), rel=1e-6)
    told = SAME[name].encoded(dp, zero)
    assert told == pytest.approx(bits.total(job.recommended), rel=1e-3)
    assert SAME[name].encoded(None, None) == SAME[name].native()


def test_zero_plus_plus_is_that_of_the_table() -> None:
    assert JobTraffic(3).plus_plus() == bits.total(bits.JOBS["zeropp"].today)


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (JobTraffic(0), []),
        (JobTraffic(1, micro_batches=8), []),
        (JobTraffic(2), []),
        (
            JobTraffic(2, micro_batches=8),
            ['12.5 with "dp": {"accumulate": "node"}: 4 bytes', "12.5 with ZeRO 1"],
        ),
        (
            JobTraffic(3),
            [
                '6.3 with "secondary": {',
                '7.2 with "secondary": "exact',
                "8.5 with fully_shard on a mesh of nodes",
                "12.5 with ZeRO 1",
                "12.5 with zero_hpz",
            ],
        ),
        (
            JobTraffic(3, micro_batches=8),
            [
                '6.3 with "dp": {"accumulate": "node"} and "secondary": {"bits": 8}',
                '7.2 with "dp": {"accumulate": "node"} and "secondary": "exact": 6 bytes',
                '12.5 with "dp": {"accumulate": "node"} and zero_hpz',
                "12.5 with ZeRO 1",
                "68.1 with fully_shard",
                '136.4 with "dp": {"accumulate": "node"}',
            ],
        ),
        (JobTraffic(3, copy="native"), []),
    ],
)
def test_what_sends_less_is_said_the_least_first(job: JobTraffic, words: list[str]) -> None:
    first, *found = bits_between.lines(RECOMMENDED, job)
    assert ("ZeRO++" in first) == (job.stage == 3)
    assert len(found) == len(words)
    assert all(line.strip().startswith(word) for line, word in zip(found, words, strict=True)), (
        found
    )


def test_frozen_parameters_cross_in_gathers_alone_until_they_are_kept() -> None:
    lora, codecs = JobTraffic(3, frozen=0.75), RECOMMENDED.codecs()
    dp, zero = codecs["dp", "forward"], codecs["zero", "forward"]
    assert lora.native() == 0.25 * 16 + 2 * 16
    whole = JobTraffic(3).encoded(dp, zero)
    assert lora.encoded(dp, zero) == pytest.approx(whole - 0.75 * 4.26, abs=0.01)
    for changed in ({"frozen_kept": True}, {"copy": "exact"}, {"stage": 1}):
        kept = replace(lora, **changed)
        assert kept.encoded(dp, zero) == 0.25 * replace(kept, frozen=0.0).encoded(dp, zero)
    first, *found = bits_between.lines(RECOMMENDED, lora)
    assert "natively 36.0, ZeRO++ 3.0" in first
    assert '5.2 with "zero": {"frozen": "device"}: 1.05 bytes a parameter' in "".join(found)
    keeping = CompressionConfig.parse({"zero": {"frozen": "device"}})
    assert "sends 12.0 bits" in next(bits_between.lines(keeping, lora))


#: a peft job at ZeRO 3 on two nodes of two ranks (docs/link.md): its parameters, the share that was
#: frozen, and the MB that a node sent in a step, natively and with "frozen"
ADAPTERS = 15_062_528, 0.9793, {"gathered": 42.745, "device": 1.2124}


@pytest.mark.parametrize("kept", ["gathered", "device"])
def test_frozen_once_sends_what_interfaces_counted(kept: Any, said_of: Callable[..., str]) -> None:
    """By validate's bits, pays' bytes and the planner's.

    Natively 7 % less was counted, as the frozen embedding has no backward pass, and with what is
    kept 13 % less, as some adapters are so small that DeepSpeed leaves them on all ranks.
    """
    numel, frozen, counted = ADAPTERS
    spare = {"gathered": 0.93, "device": 0.87}[kept]
    job = JobTraffic(3, frozen=frozen, frozen_kept=kept == "device")
    assert 3 / 4 * job.native() * numel / 8e6 * spare == pytest.approx(counted[kept], rel=0.01)

    block = {"zero": {"frozen": kept}} if kept == "device" else {"preset": "none"}
    words = ["--ranks", "4", "--parameters", str(numel), "--compute", "1", "--link", "0.1"]
    shown = said_of("pays", {**JOB, "compression": block}, *words, "--frozen", str(frozen))
    said = re.search(r"natively and ([\d.]+) MB encoded", shown)
    if kept == "device":
        assert said and float(said[1]) * spare == pytest.approx(counted[kept], rel=0.01)

    llama = Decoder("llama", 512, 4, 8, 8, 64, 1376, 2048, gated=True)
    adapted = AdaptedModel(llama, frozen)
    planned = PlannedJob(adapted, machines(24, 2, 2), Batch(4, 64), SearchLimits())
    layout = Layout(data=4, zero_stage=3, cuts=(6,), frozen=kept, knobs=(0, 0, 0))
    told = predicted(planned, work_of(planned, layout), Choices())
    sent = 2 * sum(told.between_nbytes.values()) / 1e6 * numel / llama.parameters
    assert sent * spare == pytest.approx(counted[kept], rel=0.03)


@pytest.mark.parametrize(("share", "status"), [("0.75", 0), ("1", 2), ("-0.1", 2)])
def test_validate_takes_the_frozen_share(
    share: str, status: int, said_of: Callable[..., str]
) -> None:
    settings = {**JOB, "compression": {"zero": {"frozen": "device"}}}
    said = said_of("validate", settings, "--frozen", share, status=status)
    assert ("--frozen" if status else "sends 12.0 bits a parameter (natively 36.0") in said


def test_nothing_is_said_of_what_is_native_or_depends_on_matrices() -> None:
    assert not list(bits_between.lines(CompressionConfig.parse({"tp": "bf16"}), JobTraffic(3)))
    low_rank = CompressionConfig.parse({"dp": {"codec": "powersgd", "rank": 4}})
    assert not list(bits_between.lines(low_rank, JobTraffic(0)))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, "20.8 bits a parameter (natively 48.0, ZeRO++ 12.0"),
        ({"gradient_accumulation_steps": 4}, "83.1 bits a parameter (natively 192.0, ZeRO++ 24.0"),
        ({"communication_data_type": "fp32"}, "20.8 bits a parameter (natively 64.0, ZeRO++ 12.0"),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
            "12.5 bits a parameter (natively 32.0, ZeRO++ 12.0",
        ),
        (
            {
                "gradient_accumulation_steps": 8,
                "compression": {"dp": {"codec": "blockint", "bits": 4, "accumulate": "node"}},
            },
            "260.3 bits a parameter (natively 384.0, ZeRO++ 40.1",
        ),
        (
            {"compression": {"preset": "recommended", "zero": {"secondary": "exact"}}},
            "7.2 bits a parameter (natively 48.0, ZeRO++ 12.0",
        ),
        ({"zero_optimization": {"stage": 2}}, "12.5 bits a parameter (natively 48.0, among"),
        ({"compression": {"sync": {"every": 8}}}, None),
    ],
)
def test_commands_say_it_of_a_file(
    changed: dict[str, Any], told: str | None, said_of: Callable[..., str]
) -> None:
    settings = {**JOB, "compression": {"preset": "recommended"}, **changed}
    step = ["--parameters", "1e9", "--compute", "1", "--link", "25"]
    for words in (["validate"], ["pays", *step]):
        said = said_of(words[0], settings, *words[1:])
        sends = f"between nodes a step sends {told or ''}"
        assert (sends in said) == (told is not None), said
