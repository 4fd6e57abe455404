"""Frozen shares in plans: below adapters most weights have no gradients, and may be kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridcomp.config import CompressionConfig
from hybridcomp.tools.commands import cli
from hybridcomp.tools.plan import bits_between
from hybridcomp.tools.plan.answer import files
from hybridcomp.tools.plan.layout import Layout
from hybridcomp.tools.plan.models.frozen import AdaptedModel, partly_frozen
from hybridcomp.tools.plan.models.model import BatchShape
from hybridcomp.tools.plan.plan import Plan
from hybridcomp.tools.plan.request import Batch, Found, SearchLimits
from hybridcomp.tools.plan.search.budget import AllowedChoices
from hybridcomp.tools.plan.search.search import search
from tests.tools.plan.answer.test_command import CLUSTER
from tests.tools.plan.clusters import PlannedStep, small, step
from tests.tools.plan.search.test_copies import LLAMA_7B, SPEEDS, llama, machines

SHARE = 0.75
SHARDED = Layout(data=4, zero_stage=3, cuts=(6,))


def both(layout: Layout) -> tuple[PlannedStep, PlannedStep]:
    """Return a step of ``layout`` with adapters, and one in which all weights train."""
    adapted = AdaptedModel(small(), SHARE)
    return step(layout, machines(24, 2, 2), model=adapted), step(layout, machines(24, 2, 2))


def test_kept_weights_cross_no_link() -> None:
    (_, work, gathered, before), _ = both(SHARDED)
    (_, _, kept, after), _ = both(SHARDED.replace(frozen="device"))
    sent, values = gathered.between_nbytes["zero"], work.stages[0].dense
    assert kept.between_nbytes["zero"] == pytest.approx((1 - SHARE) * sent, rel=0.01)
    assert kept.between_native_nbytes["zero"] == pytest.approx(sent, rel=0.01)
    assert kept.between_nbytes["dp"] == gathered.between_nbytes["dp"]
    assert kept.codec_seconds > gathered.codec_seconds, "kept weights are decoded before use"
    assert after["frozen"] == pytest.approx(1.4 * SHARE * values, rel=0.01)
    assert before.get("frozen", 0) == 0
    assert {**after, "frozen": 0} == {**before, "frozen": 0}


def test_what_is_frozen_has_no_gradients_and_states() -> None:
    for stage in (0, 1, 2, 3):
        (_, mine, told, held), (_, work, whole, full) = both(SHARDED.replace(zero_stage=stage))
        assert held["weights"] == full["weights"]
        assert held["optimizer"] == pytest.approx((1 - SHARE) * full["optimizer"])
        if stage:
            assert held["gradients"] == pytest.approx((1 - SHARE) * full["gradients"])
        assert told.nbytes["dp"] == pytest.approx((1 - SHARE) * whole.nbytes["dp"], rel=0.01)
        adapted, trained = mine.stages[0], work.stages[0]
        assert 0.7 < adapted.compute / trained.compute < 0.95, "weights' gradients"
        assert adapted.adam.value < trained.adam.value / 2
        assert adapted.dense == trained.dense


def test_copies_of_nodes_keep_frozen_weights() -> None:
    """DeepSpeed's own copy drops what the optimizer changes, alone."""
    for copy in ("native", "exact"):
        (_, work, told, held), (_, _, whole, _) = both(SHARDED.replace(hpz=2, copy=copy))
        share = told.between_nbytes["zero"] / whole.between_nbytes["zero"]
        assert share == pytest.approx(1 - SHARE, rel=0.02)
        values = work.stages[0].dense  # of 2 bytes, cut over 2 ranks
        assert held["copy"] == pytest.approx(values, rel=0.01)


def test_a_plan_keeps_frozen_weights_where_links_are_slow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A 7B Llama with adapters does not fit at ZeRO 1 on 14 GB; its 8-rank plan sends 1/50."""

    def found(budget: str, **codecs: Any) -> Found:
        fixed = {"tensor": 1, "stages": 1, "context": 1, "hpz": 1, "zero_stage": 3}
        limits = SearchLimits(keep=8, fixed=fixed)
        model, allowed = AdaptedModel(llama(tmp_path), 0.99), AllowedChoices.parse(budget)
        return search(model, machines(24, **codecs), allowed, Batch(64, 2048), limits)

    plans = found("recommended").plans
    best = plans[0]
    assert best.layout.frozen == "device" and best.frozen == pytest.approx(0.99)
    other = next(plan for plan in plans if plan.layout.frozen == "gathered")
    assert best.prediction.seconds < other.prediction.seconds / 2
    assert best.block["zero"]["frozen"] == "device"
    assert CompressionConfig.parse(best.block).zero.keeps_frozen is not None
    assert Plan.from_json(best.to_json()) == best
    traffic = bits_between.of_plan(best)
    assert traffic is not None
    files.write(best, machines(24), tmp_path / "plans")
    config = str(tmp_path / "plans" / "ds_config.json")
    assert cli.main(["validate", config, "--frozen", "0.99"]) == 0
    assert bits_between.told(*traffic) in capsys.readouterr().out, "validate says what plan says"
    few = {name: speed for name, speed in SPEEDS.items() if name != "expcode"}
    for budget, codecs in (("native", {}), ("recommended", few)):
        kinds = {plan.layout.frozen for plan in found(budget, **codecs).plans}
        assert kinds == {"gathered"}, budget


def test_the_command_takes_blocks_or_a_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tied = {**LLAMA_7B, "tie_word_embeddings": True, "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(tied))
    slow = {**CLUSTER, "memory_gb": 24, "between": {"gbytes_per_second": 0.1}, "codecs": SPEEDS}
    (tmp_path / "cluster.json").write_text(json.dumps(slow))
    words = ["plan", str(tmp_path / "config.json"), "--cluster", str(tmp_path / "cluster.json"),
             "--samples", "8", "--length", "512", "--out", str(tmp_path / "plans"),
             "--fix", "zero_stage=3", "--fix", 'frozen="device"']  # fmt: skip
    assert cli.main([*words, "--frozen", "0.99"]) == 0
    said = capsys.readouterr().out
    assert "frozen once" in said and "nothing frozen" not in said
    for wrong in ("1.0", "0.0", "2"):
        assert cli.main([*words, "--frozen", wrong]) == 2, wrong
        assert "--frozen: found " in capsys.readouterr().err
    assert cli.main(words) != 0, "nothing is frozen that could be kept"


def test_adapted_layers_have_less_to_compute_backward() -> None:
    whole = small(blocks=4)
    assert partly_frozen(whole, None) is whole
    shape = BatchShape(2, 128)
    for own, layer in zip(
        AdaptedModel(whole, SHARE).layers(shape), whole.layers(shape), strict=True
    ):
        assert layer.flops <= own.backward_flops <= layer.backward_flops
