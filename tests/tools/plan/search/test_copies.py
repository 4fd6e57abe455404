"""Secondary shards of ZeRO 3 in plans: chosen if links are slow and full weights do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridcomp.tools.commands import cli
from hybridcomp.tools.plan import bits_between
from hybridcomp.tools.plan.answer import files, report
from hybridcomp.tools.plan.choices import Choices
from hybridcomp.tools.plan.layout import Layout
from hybridcomp.tools.plan.machines.cluster import Cluster
from hybridcomp.tools.plan.machines.cluster_file import parse
from hybridcomp.tools.plan.models.decoder import Decoder
from hybridcomp.tools.plan.models.reading import read_model
from hybridcomp.tools.plan.request import Batch, Found, SearchLimits
from hybridcomp.tools.plan.search.budget import AllowedChoices
from hybridcomp.tools.plan.search.search import kind_of, search
from tests.tools.plan.clusters import small, step

LLAMA_7B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "vocab_size": 32000, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
SPEEDS = {name: {"gbytes_per_second": 100.0} for name in ("blockint", "expcode", "stepcode", "mpc")}
COPIED = Layout(data=4, zero_stage=3, cuts=(6,), hpz=2, copy="exact")


def machines(memory_gb: float, nodes: int = 4, ranks: int = 8, **codecs: Any) -> Cluster:
    """Return nodes of GPUs with 25 Gb/s between them."""
    return parse({
        "version": 1, "kind": "described", "nodes": nodes, "ranks_per_node": ranks,
        "device": "a GPU", "memory_gb": memory_gb, "tflops": {"bf16": 100.0},
        "memory_gbytes_per_second": 1000.0,
        "inside": {"gbytes_per_second": 100.0}, "between": {"gbytes_per_second": 3.125},
        "codecs": codecs or SPEEDS,
    })  # fmt: skip


def llama(folder: Path) -> Decoder:
    path = folder / "config.json"
    path.write_text(json.dumps(LLAMA_7B))
    model = read_model(str(path))
    assert isinstance(model, Decoder)
    return model


def planned(memory_gb: float, model: Any, budget: str = "recommended", **fixed: Any) -> Found:
    limits = SearchLimits(keep=3, fixed=fixed, each=True)
    batch = Batch(64, 2048)
    return search(model, machines(memory_gb), AllowedChoices.parse(budget), batch, limits)


def test_a_7b_llama_over_25_gbits_keeps_a_copy(tmp_path: Path) -> None:
    """A rank cannot hold all weights; the search evaluates at most 2,000 candidates."""
    found = planned(24, llama(tmp_path), tensor=1, stages=1, context=1)
    best = found.plans[0]
    assert best.layout.hpz == 8 and best.layout.copy in ("exact", "bits8"), best.layout
    assert best.block["zero"] == {"secondary": "exact"}
    assert best.layout.accumulate == "node" and best.block["dp"]["accumulate"] == "node"
    assert best.layout.accumulation > 1 and best in found.best
    assert found.simulated < 2000 and found.considered < 2000
    assert best.prediction.memory["copy"] == pytest.approx(2 * 6.74e9 / 8, rel=0.01)
    native = planned(24, llama(tmp_path), "native", tensor=1, stages=1, context=1).plans[0]
    assert native.layout.hpz == 8 and native.layout.copy == "native"
    assert native.prediction.seconds > best.prediction.seconds


def test_the_written_file_is_valid_and_says_its_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = planned(24, llama(tmp_path), tensor=1, stages=1, context=1).plans[0]
    files.write(best, machines(24), tmp_path / "plans", {
        "zero_optimization": {"zero_hpz_partition_size": 4}, "train_batch_size": 7,
    })  # fmt: skip
    config = tmp_path / "plans" / "ds_config.json"
    zero = json.loads(config.read_text())["zero_optimization"]
    assert zero == {"stage": 3, "zero_hpz_partition_size": 8}
    assert cli.main(["validate", str(config)]) == 0
    traffic = bits_between.of_plan(best)
    assert traffic is not None
    told = bits_between.told(*traffic)
    assert told in list(report.details(best, machines(24)))
    assert told in capsys.readouterr().out, "validate says what plan says"
    plain = Layout(data=32, zero_stage=1)
    assert "zero_hpz_partition_size" not in files.ds_config(
        type(best)(plain, Choices(), best.prediction, "m", "c", "b", 8, "bf16", "deepspeed"), {},
        {"zero_optimization": {"zero_hpz_partition_size": 4}},
    )["zero_optimization"]  # fmt: skip


@pytest.mark.parametrize(
    ("copy", "crosses", "held"),
    [("native", 16.0, 2.0), ("exact", 2.9, 2.0), ("bits8", 2.9, 33 / 32)],
)
def test_bytes_and_memory_of_a_copy(copy: str, crosses: float, held: float) -> None:
    """Parameters cross nodes once per step, for any accumulation; everything else stays inside."""
    for accumulation in (1, 4):
        layout = COPIED.replace(copy=copy, accumulation=accumulation)
        _, work, told, memory = step(layout, machines(24, 2, 2))
        values = work.stages[0].dense
        bits = 8 * 2 * told.between_nbytes["zero"] / values
        # a ring of 4 ranks natively, two nodes that exchange halves as deltas
        assert bits == pytest.approx(crosses * (3 / 4 if copy == "native" else 1 / 2), rel=0.02)
        # upstream's gather is the ring, whatever replaces it
        natively = 8 * 2 * told.between_native_nbytes["zero"] / values
        assert natively == pytest.approx(16 * 3 / 4, rel=0.02)
        assert memory["copy"] == pytest.approx(held * values / 2, rel=0.01)


def test_the_best_of_each_kind_stand_side_by_side(tmp_path: Path) -> None:
    """Two stages of two tensor ranks are faster: each gradient crosses fewer links."""
    model = llama(tmp_path)
    found = planned(24, model, micro_batch=1, context=1)
    kinds = {kind_of(plan.layout): plan for plan in found.best}
    assert not any(plan.layout.is_uncut for plan in found.plans)
    assert len(kinds) == len(found.best) and found.best[0] == found.plans[0]
    uncut = kinds["ZeRO 3, a copy in each node"]
    assert uncut == planned(24, model, micro_batch=1, tensor=1, stages=1, context=1).plans[0]
    best = found.plans[0].prediction
    assert best.seconds < uncut.prediction.seconds
    # the bytes agree: half of the parameters cross between two nodes, not all among four
    between = sum(uncut.prediction.between_nbytes.values())
    assert sum(best.between_nbytes.values()) < between / 2
    assert kinds["HSDP"].engine == "fsdp2" and kinds["HSDP"].layout.shards == 8
    lines = list(report.answer(found, machines(24)))
    bits = f"{8 * 8 * between / model.parameters:.2f}"
    (row,) = (line for line in lines if line.startswith("ZeRO 3, a copy in each node"))
    assert bits in row and str(uncut.layout) in row
    assert any("HSDP (--engine fsdp2)" in line and "hsdp8" in line for line in lines)
    assert {
        kind_of(plan.layout) for plan in planned(24, model, micro_batch=1, context=1, tensor=2).best
    } == {"layers cut, or stages"}


def test_sums_in_the_node_cross_once() -> None:
    count, block = 8, {"dp": {"codec": "blockint", "bits": 4}}
    for stage in (2, 3):
        each = Layout(data=4, zero_stage=stage, cuts=(6,), accumulation=count)
        (_, work, native, _), (_, _, node, _) = (
            step(layout, machines(24, 2, 2), block)
            for layout in (each, each.replace(accumulate="node"))
        )
        crosses, values = node.between_nbytes["dp"], work.stages[0].dense
        assert native.between_nbytes["dp"] == pytest.approx(count * crosses)
        assert crosses == pytest.approx(4.25 / 8 * values / 4, rel=0.02)
        assert node.memory["sums"] == pytest.approx(4 * values / 2, rel=1e-4)
        assert native.memory["sums"] == 0 and node.nbytes["dp"] < native.nbytes["dp"]


def test_sums_in_the_node_need_a_codec_and_micro_batches() -> None:
    for budget in ("native", {"zero": "recommended"}):
        limits = SearchLimits(fixed={"zero_stage": 2, "tensor": 1, "stages": 1}, keep=20)
        allowed = AllowedChoices.parse(budget)
        found = search(small(blocks=4), machines(24, 2, 2), allowed, Batch(16, 128), limits)
        assert {plan.layout.accumulate for plan in found.plans} == {"native"}


def test_a_copy_needs_its_codec_and_its_dtype() -> None:
    model, batch = small(blocks=4), Batch(8, 128)
    for budget, cluster, dtype in (
        ("recommended", machines(24, 2, 2, blockint={"gbytes_per_second": 100.0}), "bf16"),
        ("native", machines(24, 2, 2), "bf16"),
    ):
        limits = SearchLimits(fixed={"zero_stage": 3, "tensor": 1}, dtype=dtype, keep=20)
        found = search(model, cluster, AllowedChoices.parse(budget), batch, limits)
        kinds = {(plan.layout.hpz, plan.layout.copy) for plan in found.plans}
        assert kinds == {(1, "native"), (2, "native")}
