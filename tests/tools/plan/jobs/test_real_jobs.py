"""Three real jobs on four ranks, started by their generated files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hybridcomp.tools.commands import cli
from tests.elastic.jobs import LENGTH, SAMPLES
from tests.paths import ROOT
from tests.ranks import python_path
from tests.tools.plan.answer.test_command import CONFIG
from tests.tools.plan.jobs.test_command import ranks_of

pytest.importorskip("deepspeed")

CLUSTER: dict[str, Any] = {
    "version": 1, "kind": "described", "nodes": 1, "ranks_per_node": 4, "device": "a CPU",
    "memory_gb": 4, "tflops": {"fp32": 0.05}, "memory_gbytes_per_second": 10,
    "inside": {"gbytes_per_second": 10}, "codecs": {"blockint": {"gbytes_per_second": 1}},
}  # fmt: skip
#: a DeepSpeed job without knowledge of other jobs: it loads the checkpoint that its file names
SCRIPT = """
import json, sys
from pathlib import Path
import deepspeed, deepspeed.ops, torch, torch.distributed as dist
from torch.utils.data import DataLoader
import hybridcomp
from tests.elastic.jobs import LENGTH, SAMPLES, Data, Layer, loss_of, target

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
config, place, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
deepspeed.init_distributed("gloo", verbose=False)
model = torch.nn.Sequential(Layer(0), Layer(1))
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=list(model.parameters()), config=config)
sampler = hybridcomp.ElasticSampler(LENGTH, SAMPLES, tail="keep")
if place.is_dir():
    _, state = engine.load_checkpoint(str(place))
    sampler.load_state_dict(state["sampler"])
micro = engine.train_micro_batch_size_per_gpu()
while sampler.steps < steps:
    loader = DataLoader(Data(), batch_size=micro, sampler=sampler)
    for number, (indices, values) in enumerate(loader):
        loss = loss_of(engine(values), target(values))
        engine.backward(loss)
        engine.step()
        with open(f"c.{dist.get_rank()}.log", "a") as log:
            line = [sampler.steps, dist.get_world_size(), indices.tolist()]
            print(json.dumps(line), file=log)
        if (number + 1) % engine.gradient_accumulation_steps() == 0:
            sampler.stepped()
            if sampler.steps % 2 == 0:
                engine.save_checkpoint(str(place), client_state={"sampler": sampler.state_dict()})
                if Path("stop").exists():
                    sys.exit(0)
            if sampler.steps == steps:
                break
engine.destroy()
"""
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone",
          "--nproc-per-node", "{ranks}"]  # fmt: skip


def job(name: str, **more: Any) -> dict[str, Any]:
    """Return a job of train_elastic.py, which resumes by itself."""
    script = str(ROOT / "scripts" / "examples" / "train_elastic.py")
    block = {"dp": {"codec": "blockint", "bits": 8}, "on_unsupported": "native"}  # or a single rank
    options = {"checkpoints": f"{name}/saved", "losses": f"{name}.jsonl", "steps": 12,
               "samples": SAMPLES, "length": LENGTH, "micro-batch": "{micro_batch}",
               "block": json.dumps(block)}  # fmt: skip
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    return {
        "name": name, "model": "config.json", "length": 64, "samples": SAMPLES,
        "samples_left": 200, "resumes": True, "ranks": {"most": 1}, "priority": 9,
        "fix": {"tensor": 1, "stages": 1, "context": 1}, "command": [*LAUNCH, script, *words],
        **more,
    }  # fmt: skip


def start(name: str, folder: Path) -> subprocess.Popen[bytes]:
    """Run a job's generated file."""
    environment = {
        **os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    with (folder / f"{name}.out").open("ab") as log:
        return subprocess.Popen([folder / "plans" / name / "start.sh"], cwd=folder,
                                stdout=log, stderr=log, env=environment)  # fmt: skip


def samples_of(folder: Path, step: int) -> list[int]:
    """Return the samples of all ranks of c in ``step``, by the last run of that step."""
    found: dict[int, list[int]] = {}
    for log in folder.glob("c.*.log"):
        for line in log.read_text().splitlines():
            number, ranks, indices = json.loads(line)
            if number == step:
                found.setdefault(ranks, []).extend(indices)
    (every,) = found.values()
    return every


@pytest.mark.nightly
def test_three_jobs_share_four_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """c runs on all; a and b arrive, c stops and resumes on half of them, and all finish."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.json").write_text(json.dumps(CLUSTER))
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 1}))
    (tmp_path / "train.py").write_text(SCRIPT)
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    (tmp_path / "base.json").write_text(
        json.dumps({"optimizer": optimizer, "zero_allow_untested_optimizer": True})
    )
    command = [*LAUNCH, "-m", "hybridcomp.run", "train.py", "{config}", "c/saved", "12"]
    c = job("c", samples_left=1e6, resumes=False, checkpoint="c/saved", ranks={}, priority=1,
            base="base.json", command=command)  # fmt: skip
    c["fix"]["zero_stage"] = 1
    (tmp_path / "jobs.json").write_text(json.dumps({"pause_seconds": 0, "jobs": [c]}))
    assert cli.main(["plan", "--jobs", "jobs.json"]) == 0
    assert ranks_of()["c"] == [0, 1, 2, 3]
    (tmp_path / "stop").touch()
    assert start("c", tmp_path).wait(300) == 0, (tmp_path / "c.out").read_text()[-4000:]
    assert (tmp_path / "c" / "saved" / "latest").read_text() == "global_step2"
    (tmp_path / "stop").unlink()
    then = json.loads((tmp_path / "plans" / "next.json").read_text())
    then["jobs"] += [job("a"), job("b")]
    (tmp_path / "jobs.json").write_text(json.dumps(then))
    assert cli.main(["plan", "--jobs", "jobs.json"]) == 0
    given = ranks_of()
    assert {name: len(ranks) for name, ranks in given.items()} == {"a": 1, "b": 1, "c": 2}
    assert sorted(rank for ranks in given.values() for rank in ranks) == [0, 1, 2, 3]
    running = {name: start(name, tmp_path) for name in given}
    deadline = time.monotonic() + 400
    for name, process in running.items():
        status = process.wait(max(1.0, deadline - time.monotonic()))
        assert status == 0, (tmp_path / f"{name}.out").read_text()[-4000:]
    for name in "ab":
        lines = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [*range(1, 13)]
        seen = [sample for line in lines[: LENGTH // SAMPLES] for sample in line["samples"]]
        assert len(seen) == len(set(seen)) == LENGTH // SAMPLES * SAMPLES
    steps = [samples_of(tmp_path, step) for step in range(12)]
    seen = [sample for step in steps[: LENGTH // SAMPLES] for sample in step]
    assert len(seen) == len(set(seen)) == LENGTH // SAMPLES * SAMPLES
    assert (tmp_path / "c" / "saved" / "latest").read_text() == "global_step12"
