"""The planner's data types: layouts, choices, budgets, and the contents of ``plan.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridcomp.config import CompressionConfig
from hybridcomp.dimensions import KEYS, Key
from hybridcomp.errors import ConfigError, HybridcompError
from hybridcomp.tools.plan.choices import NATIVE, Choice, Choices
from hybridcomp.tools.plan.layout import LATER, Layout, even_cuts
from hybridcomp.tools.plan.plan import Plan, Prediction, Span
from hybridcomp.tools.plan.search.budget import AllowedChoices

LAYOUT = Layout(
    tensor=2, sequence=True, stages=2, virtual=2, cuts=(3, 2, 2, 1), data=4, expert=2,
    zero_stage=1, micro_batch=2, accumulation=8, recompute=((0, 2), (4, 5)),
)  # fmt: skip
THIRD: dict[str, Any] = {"data": 4, "zero_stage": 3}


def prediction() -> Prediction:
    return Prediction(
        seconds=2.0, low=1.8, high=2.3, tokens_per_second=1e4, compute_seconds=1.0,
        bubble_seconds=0.25, codec_seconds=0.1, memory={"weights": 3.0, "host": 4.0},
        memory_by_stage=(3.0, 2.0), nbytes={"dp": 1.0}, native_nbytes={"dp": 4.0},
        exposed={"dp": 0.2}, hidden={"dp": 0.1}, spans=(Span("F0", "stage 0", 0.0, 0.5),),
    )  # fmt: skip


def test_ranks_are_numbered_as_upstream_numbers_them() -> None:
    assert LAYOUT.ranks == 16 and LAYOUT.samples == 64
    assert LAYOUT.members("tensor", 5) == (4, 5)
    assert LAYOUT.members("data", 5) == (1, 3, 5, 7)
    assert LAYOUT.members("expert", 5) == (5, 7)
    assert LAYOUT.members("pipeline", 5) == (5, 13)
    assert LAYOUT.chunks(0) == [(0, 1, 2), (5, 6)]
    assert LAYOUT.chunks(1) == [(3, 4), (7,)]
    assert LAYOUT.recomputed == {0, 1, 4}
    cut = Layout(tensor=2, context=2, data=2)
    assert cut.members("context", 1) == (1, 3) and cut.members("replicas", 1) == (1, 3, 5, 7)
    meshed = Layout(mesh=2, data=2)
    assert meshed.members("row", 6) == (6, 7) and meshed.members("column", 6) == (4, 6)
    assert meshed.members("data", 6) == (2, 6) and meshed.ranks == 8
    assert even_cuts(8, 3) == (3, 3, 2)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tensor": 0}, "tensor 0; expected 1 or more"),
        ({"zero_stage": 4}, "zero_stage 4; expected 0 to 3"),
        ({"data": 4, "expert": 3}, "expert 3; expected a divisor of the 4 replicas"),
        ({"stages": 2, "cuts": (1, 2, 3)}, "expected 2 numbers of layers"),
        ({"context_way": "star"}, "context_way 'star'"),
        ({"mesh": 2, "tensor": 2}, "expected one of them to be 1"),
        ({"slices": (4, 4)}, "in 2 stages or more"),
        ({"slices": (4,), "stages": 2}, "several"),
        ({"slices": (4, 0), "stages": 2}, "a token or more"),
        ({"copy": "exact"}, "copy 'exact' over 1 ranks"),
        ({**THIRD, "hpz": 2, "copy": "half"}, "copy 'half'"),
        ({**THIRD, "hpz": 2, "zero_stage": 1}, "hpz 2 at ZeRO 1"),
        ({**THIRD, "hpz": 3}, "a divisor of the 4 replicas"),
        ({"data": 4, "shards": 2}, "shards 2, stays False at ZeRO 0"),
        ({**THIRD, "shards": 3}, "shards 3"),
        ({"data": 4, "frozen": "device"}, "frozen 'device' at ZeRO 0"),
        ({**THIRD, "frozen": "device", "hpz": 2}, "frozen 'device'"),
        ({**THIRD, "frozen": "disk"}, "frozen 'disk'"),
        ({"data": 4, "accumulate": "node", "zero_stage": 1, "accumulation": 2}, "accumulate"),
        ({**THIRD, "accumulate": "node"}, "accumulate 'node' at ZeRO 3 and 1 micro-batches"),
        ({"accumulate": "x"}, "accumulate 'x'"),
        ({**THIRD, "ratio": 0.5}, "ratio 0.5 at ZeRO 3"),
        ({**THIRD, "drive": 0.5}, "drive 0.5 at ZeRO 3"),
        ({**THIRD, "knobs": (1,)}, "expected three numbers"),
    ],
)
def test_layouts_that_contradict_themselves(fields: dict[str, object], said: str) -> None:
    with pytest.raises(HybridcompError, match=f"layout: .*{said}"):
        Layout(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "written"),
    [
        (LAYOUT, "tp2s pp2v2 ep2 dp4 zero1 mb2x8 recompute 3"),
        (Layout(**THIRD, hpz=2, copy="exact"), "dp4 zero3 hpz2-exact mb1x1"),
        (Layout(**THIRD, frozen="device"), "dp4 zero3 frozen once mb1x1"),
        (Layout(**THIRD, accumulation=2, accumulate="node"), "dp4 zero3 mb1x2-node"),
        (Layout(mesh=2, data=3, zero_stage=1), "mesh2x2 dp3 zero1 mb1x1"),
        (Layout(stages=2, cuts=(3, 3), slices=(70, 58)), "pp2 slices2 mb1x1"),
        (Layout(data=8, hierarchy=(2, 2)), "dp8 mb1x1 levels 2x2"),
        (Layout(**THIRD, offload=True, ratio=0.5, knobs=(1, 2, 3)), "dp4 zero3 mb1x1 offload 0.5"),
        (Layout(**THIRD, shards=2, stays=True), "dp4 zero3 hsdp2 stays mb1x1"),
    ],
)
def test_layouts_come_back_and_are_named(layout: Layout, written: str) -> None:
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    assert str(layout) == written
    assert not set(Layout().to_json()) & set(LATER), "as plans of earlier versions have them"


def test_choices_are_the_block() -> None:
    block = {
        "dp": {"codec": "blockint", "bits": 4, "error_feedback": True},
        "zero": {"codec": "mpc", "delta": True},
        "tp": {"forward": {"codec": "expcode"}, "backward": {"error_bound": 0.01}},
        "pp": {"forward": {"codec": "none"}, "backward": {"codec": "blockint", "bits": 6}},
    }
    choices = Choices.of_block(block)
    assert choices.block() == block
    CompressionConfig.parse(choices.block(hierarchy=False))
    assert choices.block(hierarchy=(8, 4)) == {**block, "hierarchy": [8, 4]}
    CompressionConfig.parse(choices.block(hierarchy=(8, 4)))
    assert "hierarchy" not in Choices.of_block({"tp": "expcode"}).block(hierarchy=(8, 4))
    assert choices["pp", "forward"] == NATIVE and choices["cp", "forward"].native
    assert choices["dp", "forward"].bits(torch.bfloat16) == pytest.approx(4.26, abs=0.01)
    assert choices["zero", "forward"].bits(torch.bfloat16) == pytest.approx(7.6)
    assert NATIVE.bits(torch.float32) == 32
    assert str(choices["dp", "forward"]) == "blockint(bits=4) feedback"
    # presets are parsed too, and dimensions that turn native leave the block
    preset = Choices.of_block({"preset": "recommended"})
    assert preset["tp", "backward"] == Choice.of({"codec": "blockint", "bits": 8})
    changed = preset.changed(("tp", "forward"), NATIVE).changed(("tp", "backward"), NATIVE)
    assert "tp" not in changed.block() and "pp" in changed.block()
    assert Choices().block() == {"preset": "none"}
    with pytest.raises(HybridcompError, match="is no dimension and direction"):
        Choices.of({("dp", "backward"): Choice.of("mpc")})


def test_budgets() -> None:
    def settings(budget: AllowedChoices, key: Key, stage: int = 1) -> list[str]:
        return [str(choice) for choice in budget.options(key, stage)]

    recommended = AllowedChoices.parse("recommended")
    assert settings(recommended, ("dp", "forward")) == [
        "native", "expcode()", "blockint(bits=8)", "blockint(bits=4)",
    ]  # fmt: skip
    assert "blockint(bits=4) delta" in settings(recommended, ("zero", "forward"))
    assert not any("delta" in one for one in settings(recommended, ("zero", "forward"), 3))
    assert settings(recommended, ("offload", "forward")) == ["native", "expcode()"]
    lossless = AllowedChoices.parse("lossless")
    assert "stepcode() delta" in settings(lossless, ("zero", "forward"), 2)
    for key in KEYS:
        assert all(choice.native or choice.codec.lossless  # type: ignore[union-attr]
                   for choice in lossless.options(key))  # fmt: skip
    own = AllowedChoices.parse({"dp": 0.02, "tp": "native", "pp": {"codec": "blockint", "bits": 6}})
    assert all(one.native or one.error_feedback or one.codec.lossless  # type: ignore[union-attr]
               for one in own.options(("dp", "forward")))  # fmt: skip
    assert settings(own, ("tp", "forward")) == settings(own, ("zero", "forward")) == ["native"]
    assert settings(own, ("pp", "backward")) == ["native", "blockint(bits=6)"]
    # 8 bits cannot satisfy such a small bound
    tight = AllowedChoices.parse({"zero": 1e-4})
    assert not any("blockint" in one for one in settings(tight, ("zero", "forward")))


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("generous", "expected recommended, lossless, native"),
        ({"dq": 0.1}, "budget.dq: found 0.1; expected one of dp"),
        ({"dp": {"codec": "blockint", "bits": 99}}, "bits"),
    ],
)
def test_budgets_that_mean_nothing(written: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        AllowedChoices.parse(written)  # type: ignore[arg-type]


def test_plans_come_back_from_their_file(tmp_path: Path) -> None:
    plan = Plan(
        LAYOUT, Choices.of_block({"preset": "recommended"}), prediction(), "model", "cluster",
        "recommended", 128, "bf16", "megatron",
    )  # fmt: skip
    plan.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == plan
    assert plan.prediction.device_nbytes == 3.0
    data = json.loads((tmp_path / "plan.json").read_text())
    CompressionConfig.parse(data["block"])
    for broken, said in (
        ({**data, "hybridcomp_plan": 99}, "version 99; expected 1"),
        ({name: value for name, value in data.items() if name != "length"}, "'length'"),
        ({**data, "layout": {**data["layout"], "tensors": 2}}, "unknown keys tensors"),
    ):
        with pytest.raises(HybridcompError, match=said):
            Plan.from_json(broken)
