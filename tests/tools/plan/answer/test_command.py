"""``hybridcomp plan`` from the command line: a described cluster, a small model, all files."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from hybridcomp.codecs.words import DTYPES
from hybridcomp.config import load_config
from hybridcomp.tools.commands import cli
from hybridcomp.tools.plan.answer import arguments, command
from hybridcomp.tools.plan.machines import cluster_file
from hybridcomp.tools.plan.plan import Plan
from hybridcomp.tools.plan.request import Engine
from hybridcomp.tools.plan.search import budget
from tests.paths import CONFIGS, ROOT

CLUSTER: dict[str, Any] = {
    "version": 1, "kind": "described", "nodes": 2, "ranks_per_node": 2, "device": "made",
    "memory_gb": 4, "tflops": {"bf16": 50}, "memory_gbytes_per_second": 500,
    "inside": {"gbytes_per_second": 20}, "between": {"gbytes_per_second": 0.2},
    "codecs": {"blockint": {"gbytes_per_second": 100}, "expcode": {"gbytes_per_second": 50},
               "mpc": {"gbytes_per_second": 50}}, "host": {"gbytes_per_second": 10},
}  # fmt: skip
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024,
    "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16,
    "vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
#: part of the search, where a test is about what is said
ALONE = ["--fix", "tensor=1", "--fix", "stages=1", "--fix", "context=1", "--fix", "micro_batch=2"]


@dataclass
class Planning:
    """Runs ``hybridcomp plan`` for ``CONFIG`` on ``CLUSTER``, or on one with changed fields."""

    folder: Path
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *more: str, status: int = 0, **changed: Any) -> str:
        """Return the output of a run, or its error."""
        (self.folder / "cluster.json").write_text(json.dumps({**CLUSTER, **changed}))
        files = [str(self.folder / "config.json"), "--cluster", str(self.folder / "cluster.json")]
        batch = ["--samples", "16", "--length", "512", "--out", str(self.folder / "plans")]
        assert cli.main(["plan", *files, *batch, *more]) == status
        shown = self.capsys.readouterr()
        return shown.err if status else shown.out

    @property
    def best(self) -> Plan:
        return Plan.read(self.folder / "plans" / "plan.json")


@pytest.fixture
def planning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Planning:
    monkeypatch.setattr(command, "_draw", lambda *_: None)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return Planning(tmp_path, capsys)


def test_islands_are_noted_beside_the_plans(planning: Planning) -> None:
    """Only a note, as islands change a training; none if dp and zero hardly lengthen a step."""
    alone = [*ALONE, "--budget", "native"]
    said = planning(*alone)
    assert "note: messages of dp and zero lengthen" in said
    block = json.loads(said.partition('"sync": ')[2].splitlines()[0])
    assert block["islands"] == "node" and block["every"] >= 10
    assert "note: messages of dp" not in planning(*alone, between={"gbytes_per_second": 1000})


def test_a_plan_from_the_command_line(
    planning: Planning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # it draws
    fixed = ["--fix", "tensor=1", "--fix", "context=1", "--fix", "micro_batch=2"]
    said = planning(*fixed, "--no-recompute", "--", "echo", "{stages}", "{config}")
    assert said.lstrip().startswith("plan ") and "\n1 native" in said
    assert "The first beside the second:" in said and "start it with" in said
    assert "picture" in said
    out, plan = tmp_path / "plans", planning.best
    assert plan.layout.tensor == 1 and plan.layout.ranks == 4
    assert plan.choices.items, "the link between the nodes is slow: native would be strange"
    block = load_config(out / "ds_config.json")
    assert block is not None and block.planned is not None
    assert [key for key, codec in block.codecs().items() if codec] == [
        key for key in block.codecs() if not plan.choices[key].native
    ]
    assert f"exec echo {plan.layout.stages} " in (out / "start.sh").read_text()
    every = [Plan.from_json(one) for one in json.loads((out / "plans.json").read_text())]
    steps = [one.prediction.seconds for one in every]
    assert every[0] == plan and steps == sorted(steps)
    planning(*ALONE, "--budget", "native")
    assert not planning.best.choices.items
    assert planning.best.prediction.seconds > plan.prediction.seconds


@pytest.mark.nightly
def test_what_the_cluster_lacks_is_said(planning: Planning) -> None:
    notes = [line for line in planning().splitlines() if line.startswith("note: ")]
    assert any("says nothing about stepcode: no plan has these codecs" in note for note in notes)
    said = planning("--offload")
    assert "cluster.json says nothing about codecs on the hosts" in said
    assert 'write "host_codecs" into it' in said
    assert "steps there are planned as fast as on the devices" in said
    assert 'write "host_memory_gbytes_per_second" into it' in said
    # chosen by the user, offload needs no --offload
    fixed = ["--fix", "offload=true", "--fix", "zero_stage=2", "--fix", "stages=1"]
    assert "nothing about the optimizer on the hosts" in planning(*fixed)
    known = planning("--offload", host_memory_gbytes_per_second=50)
    assert "optimizer on the hosts" not in known
    for field, said in (
        ("memory_gbytes_per_second", "no matrix product, and the optimizer's step, is planned as"),
        ("host", "no plan has its optimizer on the host"),
    ):
        lacking: dict[str, Any] = {field: None}
        shown = planning("--offload", **lacking)
        assert said in shown and f'write "{field}" into it' in shown


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--budget", "medium"], "budget"),
        (["--budget", '{"dp": '], "expected JSON"),
        (["--fix", "tensors=2"], "fixed.tensors"),
        (["--fix", "nodes=[[1]]"], "fixed.nodes: found"),
        (["--fix", "tensor=0"], "fixed.tensor: found 0; expected a whole number of 1 or more"),
        (["--fix", "tensor=true"], "fixed.tensor: found True"),
        (["--fix", "tensor=3"], "none has tensor=3, as was decided"),
        (["--fix", "zero_stage=4"], "expected 0, 1, 2 or 3"),
        (["--fix", "zero_stage=2", "--fix", "stages=2"], "pipelines have ZeRO 0 and 1"),
        (["--fix", "zero_stage=2", "--engine", "megatron"], "optimizer is ZeRO 1"),
        (["--fix", "offload=2"], "expected true or false"),
        (["--fix", "offload=true", "--fix", "stages=2"], "none that is possible has offload=True"),
        (["--fix", "recompute=true"], "expected segments of layers"),
        (["--fix", "recompute=[[1, 99]]"], "ends at layer 99, and the model has 10"),
        (["--fix", "cuts=10"], "expected numbers of 0 or more"),
        (["--fix", "cuts=[1, 2]"], "cuts [1, 2] hold 3 layers, and the model has 10"),
        (["--fix", "cuts=[5, 5]", "--fix", "stages=4"], "are 2 chunks, and 4 are wanted"),
        (["--fix", "slices=5"], "expected numbers of 1 or more"),
        (["--fix", "slices=[3, 4]"], "slices hold 7 tokens, and a sample has 512"),
        (["--fix", 'context_way="star"'], 'expected "ulysses" or "ring"'),
        (["--fix", 'copy="half"'], 'fixed.copy: found \'half\'; expected "native" or "exact"'),
        (["--fix", 'frozen="disk"'], 'expected "gathered" or "device"'),
        (["--fix", "accumulate=true"], 'expected "native" or "node"'),
        (["--fix", "hierarchy=[2]"], "ranks of a node and nodes of a site, such as [8, 4]"),
        (
            ["--fix", 'context_way="ulysses"', "--fix", "context=2", "--engine", "megatron"],
            "as was decided",
        ),
        (["--fix", "micro_batch=5"], "none that is possible has micro_batch=5, as was decided"),
        (["--ranks", "0"], "ranks: found 0; expected 1 or more"),
        (["--fix", "tensor"], "expected NAME=VALUE"),
        (["--ranks", "64"], "64 ranks are wanted, and the cluster has 4"),
        (["--memory", "0.001"], "no plan: "),
        (["--try", "2"], "expected -- and the command of a training"),
        (["--try", "-1", "--", "train"], "--try: found -1"),
        (
            ["--try", "1", "--", "/no/such/train", "{config}{tensor}{stages}{cuts}"],
            "/no/such/train",
        ),
        (["--plan", "plan.json"], "goes with --check RUN"),
        (["--replay"], "--replay: found True; goes with --jobs"),
        (["--now", "3"], "--now: found 3.0; goes with --jobs"),
        (["--scheduler", "slurm"], "--scheduler: found 'slurm'; goes with --jobs"),
        (["--base", "nowhere.json"], "nowhere.json"),
        (["--out", "/proc/none/plans"], "/proc/none"),
        (["--budget", '{"dp": null}'], "budget.dp: found None; expected recommended"),
        (["--budget", '{"dp": true}'], "budget.dp: found True"),
        (
            ["--dtype", "fp16"],
            "--dtype: found 'fp16'; the cluster's file says how fast matrix products are in: bf16",
        ),
        (
            ["--budget", '{"dp": {"codec": "zfp", "rate": 8}}'],
            "budget.dp: found 'zfp(rate=8)'; the cluster's file has no figure for it",
        ),
        (["--cluster", "nowhere.json"], "nowhere.json: found 'no such file'; write it with"),
    ],
)
def test_bad_input_is_one_sentence(planning: Planning, more: list[str], said: str) -> None:
    error = planning(*more, status=cli.BAD_INPUT)
    assert said in error and error.count("\n") == 1


def test_codecs_without_a_price_are_named_once(planning: Planning) -> None:
    few = {"blockint": {"gbytes_per_second": 100}}
    said = planning(*ALONE, codecs=few)
    notes = [line for line in said.splitlines() if "says nothing about expcode, mpc" in line]
    assert len(notes) == 1 and said.count("expcode") == 1
    chosen = planning.best.choices
    assert {choice.codec.name for _, choice in chosen if choice.codec} == {"blockint"}
    # the remaining codec satisfies a bound; settings without a known price are an error
    bounded = planning(*ALONE, "--budget", '{"dp": 0.02}', codecs=few)
    assert "says nothing about expcode, radix" in bounded
    assert "says nothing about blockint, expcode, mpc" in planning(*ALONE, codecs={})
    assert not planning.best.choices.items


def test_the_dtype_is_one_that_the_cluster_knows() -> None:
    assert command.dtype_of(None, cluster_file.parse({**CLUSTER, "tflops": {"fp16": 50}})) == "fp16"


def test_the_models_file_is_looked_for_first(capsys: pytest.CaptureFixture[str]) -> None:
    batch = ["--samples", "8", "--length", "128", "--cluster", "none.json"]
    assert cli.main(["plan", "nope.json", *batch]) == cli.BAD_INPUT
    error = capsys.readouterr().err
    assert "nope.json" in error and "none.json" not in error and error.count("\n") == 1


@pytest.mark.nightly
def test_the_pages_example_plans_models_of_7_and_of_20_billion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Uses the cluster in docs/planning.md, and a cluster with room for 20B."""
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    described = json.loads(page.split("```json")[1].split("```")[0])
    llama = {**CONFIG, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
             "num_attention_heads": 32}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(llama))
    large = {**described, "memory_gb": 80, "tflops": {"bf16": 300}}
    neox = [str(CONFIGS / "neox" / "20B.yml"), "--engine", "neox", "--samples", "16"]
    pytest.importorskip("yaml")
    # part of the search, with all its steps: tensor and micro_batch are fixed
    fixed = ["--fix", "micro_batch=1", "--fix", "tensor=2", "--no-recompute", "--length", "512"]
    files = ["--cluster", str(tmp_path / "cluster.json"), "--out", str(tmp_path / "plans")]
    for cluster, words in (
        (described, [str(tmp_path / "config.json"), "--samples", "256"]), (large, neox)
    ):  # fmt: skip
        (tmp_path / "cluster.json").write_text(json.dumps(cluster))
        assert cli.main(["plan", *words, *files, *fixed]) == 0
        assert capsys.readouterr().out.splitlines()[2].split()[0] == "1"


def test_options_without_effect_are_said(planning: Planning) -> None:
    fixed = [*ALONE, "--fix", "zero_stage=1", "--offload"]
    said = planning(*fixed, "--engine", "megatron", "--own-cuts", "ring")
    assert "note: --offload has no effect: plans of megatron have no optimizer" in said
    assert "note: --own-cuts has no effect: megatron builds none of them" in said
    assert "no effect" not in planning(*fixed)
    on_cpu = planning(*fixed, device="a CPU")
    assert "note: --offload has no effect: a CPU is its own host" in on_cpu


def test_a_plan_that_is_nowhere_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--check", ".", "--plan", str(tmp_path / "none.json")]) == 2
    assert "none.json: No such file or directory" in capsys.readouterr().err


def test_files_in_the_way_are_seen_before_the_search(planning: Planning, tmp_path: Path) -> None:
    (tmp_path / "plans").write_text("")
    error = planning(status=cli.BAD_INPUT)
    assert "--out: found" in error and "it is a file" in error


def test_what_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan"]) == cli.BAD_INPUT
    assert "MODEL" in capsys.readouterr().err
    assert cli.main(["plan", "config.json"]) == cli.BAD_INPUT
    assert "--samples" in capsys.readouterr().err


def test_the_command_line_knows_what_the_planner_knows() -> None:
    assert get_args(Engine) == arguments.ENGINES
    assert tuple(DTYPES) == arguments.DTYPES
    assert budget.NAMES == arguments.NAMES
    assert cluster_file.DEFAULT == arguments.CLUSTER


def test_fixed_values() -> None:
    assert command.fixed_of(["tensor=2", "cuts=[1, 3]", "recompute=[[0, 2]]", "offload=true"]) == {
        "tensor": 2, "cuts": (1, 3), "recompute": ((0, 2),), "offload": True,
    }  # fmt: skip


def test_options_of_the_users_command_are_not_ours() -> None:
    own, behind = arguments.split(["plan", "m", "--try", "2", "--", "torchrun", "--", "--try", "x"])
    assert own == ["plan", "m", "--try", "2"]
    assert behind == ["torchrun", "--", "--try", "x"]


def test_a_frozen_front_asks_for_other_stages(planning: Planning) -> None:
    """Fewer stages and more replicas, as frozen layers need neither memory nor messages."""
    fixed = ["--fix", "tensor=1", "--fix", "zero_stage=0", "--fix", "context=1", "--no-recompute"]
    fixed += ["--fix", "micro_batch=1", "--budget", "native"]
    room: dict[str, Any] = {"memory_gb": 2.0, "between": {"gbytes_per_second": 20}}
    said, layout = planning(*fixed, "--frozen", "6", **room), planning.best.layout
    before = re.search(r"the layout with nothing frozen, (\d+) x \d+, takes (\S+) ms a step", said)
    assert before is not None and layout.stages < int(before[1])
    assert planning.best.prediction.seconds < 1e-3 * float(before[2])
    assert f"note: {layout.stages} stage(s) x {layout.data} replicas take" in said
    assert f"--stages {layout.stages} goes over to this one" in said
    said = planning(*fixed, "--fix", "stages=4", "--frozen", "4", **room)
    assert "replicas are fastest with nothing frozen, too" in said


def test_no_block_or_all_cannot_be_frozen(planning: Planning, tmp_path: Path) -> None:
    for frozen in ("0", "8"):
        assert "--frozen: found " in planning("--frozen", frozen, status=2)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    assert "untie them to freeze the front" in planning("--frozen", "2", status=2)
