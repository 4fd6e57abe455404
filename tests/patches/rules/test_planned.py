"""A plan holds for one layout: other jobs are rejected, with the difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridcomp.config import CompressionConfig
from hybridcomp.errors import ConfigError
from hybridcomp.patches.rules.planned import hold_to_machines, hold_to_plan
from hybridcomp.tools.commands import cli
from tests.ranks import RunRanks, run_ranks

LAYOUT = {"data": 2, "tensor": 1, "stages": 1, "zero_stage": 1}


def plan(folder: Path, **changed: int) -> str:
    path = folder / "plan.json"
    whole = {"hybridcomp_plan": 1, "layout": {**LAYOUT, **changed}, "block": {"zero": "mpc"}}
    path.write_text(json.dumps(whole))
    return str(path)


def block(path: str) -> dict[str, str]:
    return {"preset": "planned", "plan": path}


def test_what_differs_is_said_and_what_is_not_known_is_not_asked(tmp_path: Path) -> None:
    config = CompressionConfig.parse(block(plan(tmp_path)))
    hold_to_plan(config, LAYOUT)
    hold_to_plan(config, {"ranks": 2, "tensor": None})
    with pytest.raises(ConfigError) as caught:
        hold_to_plan(config, {**LAYOUT, "stages": 2, "data": 1})
    said = (
        "this job has data parallel 1 instead of 2, pipeline stages 2 instead of 1; start the job"
    )
    assert said in str(caught.value)
    with pytest.raises(ConfigError, match="ranks that shard a model 2 instead of 1"):
        hold_to_plan(config, {**LAYOUT, "shards": 2})  # the plan names none
    hold_to_plan(CompressionConfig.parse({"preset": "recommended"}), {"ranks": 7})


def test_where_the_optimizer_is_belongs_to_the_layout(tmp_path: Path) -> None:
    """Old plans do not record it, and their digests are unchanged."""
    before = CompressionConfig.parse(block(plan(tmp_path)))
    moved = CompressionConfig.parse(block(plan(tmp_path, offload=True)))
    assert moved.digest() == before.digest()
    hold_to_plan(moved, {**LAYOUT, "offload": 1})
    with pytest.raises(ConfigError, match="this job has optimizers on a host 0 instead of 1"):
        hold_to_plan(moved, {**LAYOUT, "offload": 0})
    stays = CompressionConfig.parse(block(plan(tmp_path, offload=False)))
    hold_to_plan(stays, {**LAYOUT, "offload": 0})
    hold_to_plan(stays, LAYOUT)


@pytest.mark.parametrize(("now", "said"), [
    ([(0, "A CPU, 4 threads"), (0, "A CPU, 4 threads"), (1, "A CPU, 4 threads")], None),
    ([(7, "A CPU, 2 threads"), (7, "A CPU, 2 threads"), (5, "A CPU, 2 threads")], None),
    ([(0, "A CPU"), (0, "A GPU"), (1, "A CPU")], "rank 1 was A CPU and is A GPU"),
    ([(0, "A CPU"), (1, "A CPU"), (2, "A CPU")], "ranks 0 and 1 were on one node and are on two"),
    ([(0, "A CPU"), (0, "A CPU"), (0, "A CPU")], "ranks 0 and 2 were on two nodes and are on one"),
])  # fmt: skip
def test_other_machines_are_refused_in_one_sentence(
    tmp_path: Path, now: list[tuple[int, str]], said: str | None
) -> None:
    path = Path(plan(tmp_path))
    written = json.loads(path.read_text())
    machines = [[0, "A CPU, 4 threads"], [0, "A CPU, 4 threads"], [1, "A CPU, 4 threads"]]
    path.write_text(json.dumps({**written, "machines": machines}))
    config = CompressionConfig.parse(block(str(path)))
    if said is None:
        hold_to_machines(config, lambda: now)
        return
    with pytest.raises(ConfigError) as caught:
        hold_to_machines(config, lambda: now)
    assert f"was measured on another cluster: {said}; run `hybridcomp measure`" in str(caught.value)


def test_a_plan_without_machines_asks_nobody_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    path = Path(plan(tmp_path))
    hold_to_machines(CompressionConfig.parse(block(str(path))), pytest.fail)
    unknown = {**json.loads(path.read_text()), "machines": [[-1, "A CPU"], [-1, "A CPU"]]}
    path.write_text(json.dumps(unknown))
    config = CompressionConfig.parse(block(str(path)))
    hold_to_machines(config, lambda: [(0, "A CPU"), (1, "A CPU")])  # the nodes were unknown
    path.write_text(json.dumps({**unknown, "machines": [["A CPU", 1]]}))
    with pytest.raises(ConfigError, match="no list of nodes and devices"):
        CompressionConfig.parse(block(str(path)))


def test_validate_holds_a_file_against_its_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds_config.json"
    stage = {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 2}
    file.write_text(json.dumps({**stage, "compression": block(plan(tmp_path, micro_batch=2))}))
    assert cli.main(["validate", str(file), "--world-size", "2"]) == 0
    assert cli.main(["validate", str(file), "--world-size", "4"]) == cli.BAD_INPUT
    assert "ranks 4 instead of 2" in capsys.readouterr().err


def attach(folder: str) -> tuple[str, list[float]]:
    """Start an engine of the planned layout and one of another; return the second one's error."""
    from tests.training.test_checkpoint import make_engine, train

    losses = train(make_engine(1, block=block(f"{folder}/plan.json")), 0, 2, 0)
    try:
        make_engine(2, block=block(f"{folder}/plan.json"))
    except ConfigError as error:
        return str(error), losses
    return "", losses


def test_an_engine_of_another_layout_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    plan(tmp_path, context=1, expert=1)
    for said, losses in run_ranks(2, attach, str(tmp_path)):
        assert "ZeRO stage 2 instead of 1" in said
        assert len(losses) == 2


def attach_megatron(path: str) -> list[str]:
    """Return messages of megatron-core's groups under the planned layout and another one."""
    import hybridcomp
    from hybridcomp.session import process
    from tests.stand_ins import megatron_on_cpu
    from tests.training.mcore_trainer import destroy_groups

    megatron_on_cpu.install()
    import megatron.core.distributed
    import megatron.core.optimizer  # noqa: F401
    from megatron.core import parallel_state

    megatron_on_cpu.patch()
    said = []
    for tensor in (1, 2):
        hybridcomp.install()
        process.configure(block(path))
        try:
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor)
            said.append("")
        except ConfigError as error:
            said.append(str(error))
        finally:
            parallel_state.destroy_model_parallel()
            destroy_groups()
            process.configure(None)
            hybridcomp.uninstall()
    return said


def test_a_job_on_megatron_core_of_another_layout_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    path = plan(tmp_path, context=1, expert=1)
    for fine, refused in run_ranks(2, attach_megatron, path):
        assert not fine
        assert "data parallel 1 instead of 2, tensor parallel 2 instead of 1" in refused


def attach_torch(engine: str, path: str) -> str:
    """Return the error of attaching a model of torch's engines."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import hybridcomp

    model: Any = nn.Linear(8, 8)
    model = DistributedDataParallel(model) if engine == "ddp" else fully_shard(model)
    try:
        hybridcomp.attach(model, {**block(path), "zero": "none"})
    except ConfigError as error:
        return str(error)
    model(torch.ones(2, 8)).sum().backward()
    return ""


@pytest.mark.parametrize(("engine", "stage"), [("ddp", 1), ("fsdp2", 3)])
def test_a_model_of_torchs_engines_is_held_to_its_plan(
    module_ranks: RunRanks, engine: str, stage: int, tmp_path: Path
) -> None:
    """DDP knows only its ranks; ``fully_shard`` is ZeRO 3."""
    assert module_ranks(2, attach_torch, engine, plan(tmp_path, zero_stage=stage)) == ["", ""]
    for said in module_ranks(2, attach_torch, engine, plan(tmp_path, data=4, zero_stage=stage)):
        assert "ranks 2 instead of 4" in said
