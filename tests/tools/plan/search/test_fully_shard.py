"""FSDP2 and HSDP in plans: bytes as counted, memory, the search, and the files for a script."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridcomp.config import CompressionConfig
from hybridcomp.errors import ConfigError
from hybridcomp.tools.plan import bits_between
from hybridcomp.tools.plan.answer import files, fully_shard
from hybridcomp.tools.plan.answer.start_command import left_to_user
from hybridcomp.tools.plan.choices import Choices
from hybridcomp.tools.plan.cost.predict import plan_of
from hybridcomp.tools.plan.layout import Layout
from hybridcomp.tools.plan.plan import Plan, Prediction
from hybridcomp.tools.plan.request import Batch, Found, SearchLimits
from hybridcomp.tools.plan.search.budget import AllowedChoices
from hybridcomp.tools.plan.search.search import search
from tests.docs.pages import counted_bytes
from tests.ranks import run_ranks
from tests.tools.plan.clusters import small, step
from tests.tools.plan.search.test_copies import llama, machines

#: the example of docs/results/bytes.csv, and its layouts there
EXAMPLE = small(blocks=4, hidden=256, vocabulary=257)
COUNTED = {"fsdp2": (2, 1), "hsdp": (2, 2)}
CODECS: dict[str, Any] = {
    "dp": {"codec": "blockint", "bits": 4}, "zero": {"codec": "blockint", "bits": 8},
}  # fmt: skip


def layout_of(nodes: int, ranks: int, **fields: Any) -> Layout:
    shards = ranks if ranks > 1 else 1
    given = {"data": nodes * ranks, "zero_stage": 3, "cuts": (6,), "shards": shards}
    return Layout(**{**given, **fields})


def step_of(layout: Layout, nodes: int, ranks: int, block: Any = None) -> Prediction:
    return step(layout, machines(24, nodes, ranks), block, EXAMPLE, engine="fsdp2").told


@pytest.mark.parametrize("name", COUNTED)
def test_bytes_are_those_counted_at_interfaces(name: str) -> None:
    """Natively and encoded: FSDP2 over two nodes, and an HSDP mesh of two nodes of two ranks."""
    nodes, ranks = COUNTED[name]
    counted = {row["arm"]: row for row in counted_bytes() if row["job"] == name}
    for arm, block in (("none", None), ("recommended", CODECS)):
        told = step_of(layout_of(nodes, ranks), nodes, ranks, block)
        values = EXAMPLE.parameters
        assert values == counted["none"]["parameters"]
        bits = 8 * ranks * sum(told.between_nbytes.values()) / values
        if arm in counted:
            assert bits == pytest.approx(counted[arm]["bits"], rel=0.005), arm
        else:  # by the page, which has it rounded
            assert bits == pytest.approx(4.27, rel=0.01)


def test_states_are_cut_over_a_mesh_and_sums_cross_once() -> None:
    values = EXAMPLE.parameters
    whole, mesh = layout_of(2, 2, shards=1), layout_of(2, 2)
    for layout, owners in ((whole, 4), (mesh, 2)):
        held = step_of(layout, 2, 2).memory
        states = held["weights"] + held["gradients"] + held["optimizer"]
        assert states == pytest.approx(16 * values / owners)
    each = mesh.replace(accumulation=4)
    once = each.replace(accumulate="node")
    crossing = {one: step_of(one, 2, 2).between_nbytes["dp"] for one in (mesh, each, once)}
    assert crossing[each] == pytest.approx(4 * crossing[mesh]) and crossing[once] == crossing[mesh]
    assert step_of(once, 2, 2).memory["sums"] == pytest.approx(4 * values / 2)
    block = plan(once).block
    assert "accumulate" not in block.get("dp", {}), "torch's mesh sums by itself"
    assert not step_of(mesh, 2, 2).between_nbytes["zero"]


def plan(layout: Layout, block: Any = None, nodes: int = 2, ranks: int = 2) -> Plan:
    job, work, *_ = step(layout, machines(24, nodes, ranks), None, EXAMPLE, engine="fsdp2")
    return plan_of(job, work, Choices.of_block(block) if block else Choices(), "test")


@pytest.mark.parametrize(
    ("fields", "crosses", "bits"),
    [
        ({"stays": True}, 1, 32 + 16),
        ({}, 2, 32 + 32),
        ({"hpz": 2}, 1, 32 + 16),
        ({"hpz": 2, "copy": "exact"}, 0, 32 + 2.9),
        ({"shards": 2}, 0, 64),
    ],
)
def test_what_crosses_in_each_way(fields: dict[str, Any], crosses: int, bits: float) -> None:
    """``reshard_after_forward`` as True, False and a number, our copy, and a mesh."""
    layout = layout_of(2, 2, **{"shards": 1, **fields})
    traffic = bits_between.of_plan(plan(layout))
    assert traffic is not None and traffic[1] == pytest.approx(bits)
    told = step_of(layout, 2, 2)
    blocks = 12 * 256**2 * 4 + 8 * 256
    root = EXAMPLE.parameters - blocks
    gathered = root * min(crosses, 1) + blocks * crosses
    if layout.copy == "native":
        assert 2 * told.between_nbytes["zero"] == pytest.approx(2 * gathered * 3 / 4, rel=0.001)
    text = fully_shard.module(plan(layout))
    compile(text, "sharding.py", "exec")
    wanted = {"stays": "=False", "hpz": "=2"}.get(next(iter(fields), ""), "=True")
    wanted = "=True" if layout.copy == "exact" else wanted
    assert f"reshard_after_forward{wanted}" in text
    assert ("(2, 2), mesh_dim_names=('replicate', 'shard')" in text) == (layout.shards > 1)


def found(tmp_path: Path, memory_gb: float, engine: Any, budget: str = "recommended") -> Found:
    limits, batch = SearchLimits(keep=3, engine=engine, each=True), Batch(64, 2048)
    allowed = AllowedChoices.parse(budget)
    return search(llama(tmp_path), machines(memory_gb), allowed, batch, limits)


def test_fsdp2_has_plans_of_its_own(tmp_path: Path) -> None:
    """Over 25 Gb/s a mesh or a copy in each node: nothing gathers all parameters between nodes."""
    answer = found(tmp_path, 80, "fsdp2")
    best = answer.plans[0].layout
    assert best.shards == 8 or best.hpz == 8, best
    kinds = {plan.layout.shards for plan in answer.best}
    assert 8 in kinds and all(plan.engine == "fsdp2" for plan in answer.best)
    native = found(tmp_path, 80, "fsdp2", "native").plans[0]
    assert native.layout.stays, "one gather and a reduction are 48 bits, a mesh's sums 64"
    assert native.prediction.seconds > 2 * answer.plans[0].prediction.seconds
    allowed = AllowedChoices.parse("native")
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ("fsdp2", {"zero_stage": 1}, "fully_shard is ZeRO 3"),
        ("fsdp2", {"shards": 3}, "shards can be 1, 2 (1: no mesh), whole nodes, and 3 was decided"),
        ("deepspeed", {"stays": True}, "add --engine fsdp2"),
    ]
    for engine, fixed, words in wrong:
        given = SearchLimits(engine=engine, fixed=fixed)
        none = search(small(), machines(24, 2, 2), allowed, Batch(8, 128), given)
        assert words in none.reason


def test_the_files_of_a_plan_start_it(tmp_path: Path) -> None:
    layout = layout_of(2, 2, accumulation=2, accumulate="node")
    made = plan(layout, {"dp": CODECS["dp"]})
    base = {"optimizer": {"type": "AdamW"}, "compression": {"preset": "none"}}
    written = files.write(made, machines(24, 2, 2), tmp_path, base)
    assert {path.name for path in written} == {
        "plan.json", "fsdp2.json", "sharding.py", "compression.json", "start.sh",
    }  # fmt: skip
    settings = json.loads((tmp_path / "fsdp2.json").read_text())
    assert settings["gradient_accumulation_steps"] == 2 and settings["sharding"] == "sharding.py"
    assert "compression" not in settings and settings["optimizer"] == base["optimizer"]
    block = CompressionConfig.parse(json.loads((tmp_path / "compression.json").read_text()))
    assert block.planned is not None and block.planned.layout["shards"] == 2
    start = (tmp_path / "start.sh").read_text()
    assert f"HYBRIDCOMP_CONFIG={tmp_path}/compression.json torchrun --nnodes 2" in start
    told = subprocess.run(["sh", tmp_path / "start.sh"], capture_output=True, text=True, env={})
    assert "HOST: start on every node with HOST=, the first" in told.stderr and told.returncode
    assert Plan.read(tmp_path / "plan.json") == made
    for words, lacks in ((("train.py", "{config}"), True), (("{block}", "{config}"), False)):
        assert any("{block}" in note for note in left_to_user(made, words, base)) == lacks


def trained(folder: str, *others: str) -> tuple[list[float], list[str]]:
    """Train by the files of a plan; attach with those of other layouts."""
    import runpy

    import hybridcomp

    torch.manual_seed(0)
    own = runpy.run_path(f"{folder}/sharding.py")
    layers = [torch.nn.Linear(64, 64) for _ in range(3)]
    model: Any = own["shard"](torch.nn.Sequential(*layers), layers, "cpu")
    refused = []
    for other in others:
        with pytest.raises(ConfigError) as error:
            hybridcomp.attach(model, f"{other}/compression.json")
        refused.append(str(error.value))
    hybridcomp.attach(model, f"{folder}/compression.json")
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(3):
        for micro in range(2):
            own["syncs"](model, micro == 1)
            loss = model(torch.ones(4, 64)).float().square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, refused


@pytest.mark.nightly
def test_a_script_trains_by_the_files_and_not_by_those_of_another_mesh(tmp_path: Path) -> None:
    once = {"accumulation": 2, "accumulate": "node"}
    for name, fields in (("mesh", once), ("plain", {"accumulation": 2, "shards": 1})):
        made = plan(layout_of(2, 2, **fields), {"dp": CODECS["dp"]})
        files.write(made, machines(24, 2, 2), tmp_path / name)
    wrong = plan(layout_of(2, 4), None, 2, 4)
    files.write(wrong, machines(24, 2, 4), tmp_path / "wrong")
    folders = [str(tmp_path / name) for name in ("mesh", "wrong", "plain")]
    for losses, (wider, plain) in run_ranks(4, trained, *folders):
        assert losses[2] < losses[0]
        assert "this job has ranks 4 instead of 8" in wider
        assert "ranks that shard a model 2 instead of 4" in wider
        assert "this job has ranks that shard a model 2 instead of 1;" in plain


@pytest.mark.nightly
def test_a_plan_for_one_rank_starts(tmp_path: Path) -> None:
    layout = Layout(cuts=(6,), accumulation=2)
    files.write(plan(layout, None, 1, 1), machines(24, 1, 1), tmp_path)
    ((losses, refused),) = run_ranks(1, trained, str(tmp_path))
    assert losses[2] < losses[0] and not refused
