"""Start files of a plan agree with the plan, and the block reads its plan."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from hybridcomp.codecs import BlockInt
from hybridcomp.config import load_config
from hybridcomp.errors import ConfigError, HybridcompError
from hybridcomp.tools.plan.answer import files, start_command
from hybridcomp.tools.plan.answer.base import base_of
from hybridcomp.tools.plan.choices import Choices
from hybridcomp.tools.plan.layout import Layout
from hybridcomp.tools.plan.plan import Plan
from tests.tools.plan.answer.made import CLUSTER, ENCODED, plan

BASE = {
    "train_batch_size": 7,
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 5, "offload_optimizer": {}},
    "compression": {"preset": "naive-zfp", "ledger": {"every": 5}, "min_bytes": 1},
}


def test_deepspeeds_file_is_the_users_with_what_the_plan_decides(tmp_path: Path) -> None:
    written = files.write(plan(), CLUSTER, tmp_path, BASE, ledger=tmp_path / "ledger.jsonl")
    assert [path.name for path in written] == ["plan.json", "ds_config.json", "start.sh"]
    found = json.loads((tmp_path / "ds_config.json").read_text())
    assert "train_batch_size" not in found, "it would contradict what the plan says"
    assert found["train_micro_batch_size_per_gpu"] == 2
    assert found["gradient_accumulation_steps"] == 8
    assert found["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 5}
    assert found["optimizer"] == BASE["optimizer"] and found["bf16"]["enabled"]
    ledger = {"every": 5, "jsonl": str(tmp_path / "ledger.jsonl")}
    assert found["compression"]["ledger"] == ledger
    assert "min_bytes" not in found["compression"], "the plan counted on its own"


def test_the_block_of_the_files_is_the_plans(tmp_path: Path) -> None:
    files.write(plan(), CLUSTER, tmp_path)
    block = load_config(tmp_path / "ds_config.json")
    assert block is not None and block.planned is not None
    codecs = block.policy().codecs
    assert codecs["dp", "forward"] == BlockInt(4) and block.error_feedback("dp")
    assert codecs["pp", "forward"] == BlockInt(8)
    assert codecs["pp", "backward"] is not None and codecs["pp", "backward"].name == "expcode"
    assert codecs["zero", "forward"] is None
    assert block.planned.layout["ranks"] == 4 and block.planned.layout["stages"] == 2
    assert Plan.read(tmp_path / "plan.json").choices == Choices.of(ENCODED)


def test_megatrons_arguments_and_block(tmp_path: Path) -> None:
    uneven = Layout(
        tensor=2, sequence=True, stages=2, cuts=(4, 2), zero_stage=1, micro_batch=2,
        accumulation=4, recompute=((1, 2), (2, 3), (4, 5)),
    )  # fmt: skip
    files.write(plan(uneven, engine="megatron"), CLUSTER, tmp_path)
    words = (tmp_path / "megatron_args.txt").read_text().split()
    said = dict(zip(words, words[1:], strict=False))
    assert said["--tensor-model-parallel-size"] == said["--pipeline-model-parallel-size"] == "2"
    assert said["--global-batch-size"] == "8"
    assert said["--pipeline-model-parallel-layout"] == "Ettt|tL"
    assert said["--recompute-method"] == "block"
    assert {"--sequence-parallel", "--use-distributed-optimizer", "--bf16"} <= set(words)
    block = json.loads((tmp_path / "compression.json").read_text())
    assert block == {"preset": "planned", "plan": str(tmp_path / "plan.json")}
    start = (tmp_path / "start.sh").read_text()
    assert "HYBRIDCOMP_CONFIG" in start and "torchrun --nnodes 2 --nproc-per-node 2" in start
    assert said["--recompute-num-layers"] == "2"
    segments = ((1, 3), (3, 5), (5, 7), (7, 9))
    virtual = Layout(stages=2, virtual=2, cuts=(3, 2, 2, 3), recompute=segments)
    found = files.megatron_arguments(plan(virtual, engine="megatron"))
    assert "--num-virtual-stages-per-pipeline-rank 2" in found
    assert "--recompute-method uniform" in found and "--recompute-num-layers 2" in found
    other = plan(uneven.replace(recompute=((2, 3),)), engine="megatron")
    with pytest.raises(HybridcompError, match="Megatron recomputes the first layers"):
        files.megatron_arguments(other)
    with pytest.raises(HybridcompError, match="groups of one length"):
        files.neox_config(plan(uneven, engine="neox"), {}, {})
    every = files.neox_config(plan(uneven.replace(recompute=tuple((n, n + 1) for n in range(1, 5))),
                                   engine="neox"), {}, {})  # fmt: skip
    assert every["checkpoint_activations"] and every["checkpoint_num_layers"] == 1
    groups = ((1, 3), (3, 5), (5, 6))  # and not the last block, which is followed by other layers
    pairs = plan(uneven.replace(cuts=(6, 2), recompute=groups), engine="neox")
    assert files.neox_config(pairs, {}, {})["checkpoint_num_layers"] == 2


def test_blocks_of_a_module_are_what_its_list_holds(tmp_path: Path) -> None:
    """For a module without embedding and head {cuts} omits no layer."""
    layout = Layout(stages=2, cuts=(3, 3), recompute=((0, 1), (4, 5)))
    found = start_command.places(plan(layout, blocks=(0, 6)), CLUSTER, tmp_path)
    assert found["{cuts}"] == "3,3" and found["{recompute}"] == "0,4"
    older = start_command.places(plan(layout), CLUSTER, tmp_path)
    assert older["{cuts}"] == "2,2" and older["{recompute}"] == "3"
    meshed = start_command.places(plan(Layout(mesh=2, context=1)), CLUSTER, tmp_path)
    assert meshed["{mesh}"] == "2" and meshed["{slices}"] == "none"
    sliced = start_command.places(
        plan(layout.replace(recompute=(), slices=(70, 58))), CLUSTER, tmp_path
    )
    assert sliced["{slices}"] == "70,58"


def test_neoxs_file_is_the_users_with_what_the_plan_decides(tmp_path: Path) -> None:
    base = tmp_path / "mine.yml"
    base.write_text('{"num-layers": 4, "deepspeed_extra_args": {"steps_per_print": 3}}')
    pytest.importorskip("yaml")
    settings = base_of(base, "neox")
    files.write(plan(engine="neox"), CLUSTER, tmp_path, settings)
    found = json.loads((tmp_path / "neox.yml").read_text())
    assert found["num_layers"] == 4 and found["pipe_parallel_size"] == 2
    assert found["precision"] == "bfloat16" and found["checkpoint_activations"] is False
    assert found["deepspeed_extra_args"]["steps_per_print"] == 3
    assert found["deepspeed_extra_args"]["compression"]["preset"] == "planned"
    files.write(plan(engine="neox"), CLUSTER, tmp_path, settings, port=29504)
    assert json.loads((tmp_path / "neox.yml").read_text())["master_port"] == 29504


def test_the_users_command_is_filled_in_and_runs(tmp_path: Path) -> None:
    command = ["echo", "--pp", "{stages}", "--cuts={cuts}", "{layers}", "{recompute}", "a b",
               "{config}", "{folder}/log", "--port={port}"]  # fmt: skip
    files.write(plan(), CLUSTER, tmp_path, command=command)
    said = subprocess.run(
        [tmp_path / "start.sh"], capture_output=True, text=True, check=True
    ).stdout
    assert said.split() == [
        "--pp", "2", "--cuts=1,1", "2,2", "none", "a", "b", str(tmp_path / "ds_config.json"),
        str(tmp_path / "log"), f"--port={start_command.PORT}",
    ]  # fmt: skip


def test_places_that_nobody_fills_in_are_said() -> None:
    known = ["train", "{stages}", "{folder}", "{port}", "${HOME}", '{"a": 1}']
    assert start_command.unknown_places(plan(), known, CLUSTER) == ""
    said = start_command.unknown_places(plan(), [*known, "--pp={stage}"], CLUSTER)
    assert said.startswith("{stage} in the command is left as it is; filled in are {tensor}")


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"bf16": True}, "bf16: found True; expected an object"),
        ({"zero_optimization": 3}, "zero_optimization: found 3"),
        ({"deepspeed_extra_args": {"compression": "none"}}, "compression: found 'none'"),
    ],
)
@pytest.mark.parametrize("name", ["mine.json", "mine.yml"])
def test_files_that_a_plan_cannot_write_into(
    tmp_path: Path, written: object, said: str, name: str
) -> None:
    if name.endswith("yml"):
        pytest.importorskip("yaml")
    (tmp_path / name).write_text(json.dumps(written))
    with pytest.raises(ConfigError, match=said):
        base_of(tmp_path / name, "neox")


def test_a_yaml_of_a_list_is_no_configuration(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "mine.yml").write_text("- 1\n- 2\n")
    with pytest.raises(ConfigError, match="found 'list'"):
        base_of(tmp_path / "mine.yml", "neox")
    (tmp_path / "mine.yml").write_text("")
    assert base_of(tmp_path / "mine.yml", "neox") == base_of(None, "megatron") == {}
    with pytest.raises(ConfigError, match="Megatron takes arguments"):
        base_of(tmp_path / "x.json", "megatron")


@pytest.mark.parametrize("written", ["[1]", "{}", '{"hybridcomp plan": 1}', "x", '"a"'])
def test_what_is_no_plan_is_told_with_its_file(tmp_path: Path, written: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(written)
    with pytest.raises(HybridcompError, match=r"mine\.json: .*hybridcomp plan"):
        Plan.read(path)
    whole = plan().to_json()
    path.write_text(json.dumps({**whole, "choices": [["dp"]]}))
    with pytest.raises(HybridcompError, match="expected what hybridcomp plan wrote"):
        Plan.read(path)


def test_what_a_start_still_lacks_is_said() -> None:
    """start.sh had the word SCRIPT, and ds_config.json no optimizer, without a message."""
    script, optimizer = start_command.left_to_user(plan(), (), {})
    assert "SCRIPT" in script and "behind --" in script
    assert '"optimizer"' in optimizer and "--base FILE" in optimizer
    base = {"optimizer": {"type": "AdamW"}}
    assert not list(start_command.left_to_user(plan(), ("train.py",), base))
    (script,) = start_command.left_to_user(plan(engine="megatron"), (), {})
    assert "SCRIPT" in script


def test_what_no_file_decides_is_said() -> None:
    stages = plan()
    assert "does not say stages (pp2 dp2" in start_command.left_to_script(stages, ["train.py"])
    assert start_command.left_to_script(stages, ["train.py", "--pp={stages}"]) == ""
    again = plan(Layout(data=4, cuts=(6,), recompute=((1, 3),)))
    assert "recompute" in start_command.left_to_script(again, [])
    assert start_command.left_to_script(plan(engine="megatron"), []) == ""
