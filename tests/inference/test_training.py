"""A ZeRO 3 job trains and publishes; another model computes with the published weights."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hybridcomp
from hybridcomp.inference.module_follower import ModuleFollower
from tests.paths import SCRIPTS
from tests.ranks import run_ranks
from tests.scripts_on_ranks import run_script
from tests.training.trainer import WIDTH, Job, Tiny, make_engine, parameters, train_step

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")


def trained(folder: Path, stage: int) -> list[str]:
    """Train and publish three steps; return how the other model differs from the trained one."""
    job = Job(stage=stage, dtype="bf16", steps=3, lr=1e-3)
    engine = make_engine(job)
    publisher = hybridcomp.publish(engine, folder.as_uri())
    model = Tiny().to(torch.bfloat16)
    follower = ModuleFollower(model, folder)
    wrong = []
    for step in range(3):
        train_step(engine, job, step)
        told = publisher.publish()
        if dist.get_rank() == 0:
            follower.update(told.version)
        exact = parameters(engine)
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(4, WIDTH, generator=generator).to(torch.bfloat16)
        with torch.no_grad():
            theirs = engine.module(inputs)  # collective at stage 3
        if dist.get_rank() == 0:
            here = dict(model.named_parameters())
            wrong += [
                f"step {step} {name}" for name, value in exact.items()
                if not torch.equal(here[name].view(torch.int16), value.view(torch.int16))
            ]  # fmt: skip
            if here.keys() != exact.keys() or not torch.equal(model(inputs), theirs):
                wrong.append(f"step {step}: another output")
        dist.barrier()
    publisher.close()
    engine.destroy()
    return wrong


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_model_computes_as_the_trained_one(tmp_path: Path, stage: int) -> None:
    assert run_ranks(2, trained, tmp_path, stage) == [[], []]


@pytest.mark.parametrize("stage", ["3", pytest.param("1", marks=pytest.mark.nightly)])
def test_the_example_trains_what_it_generates_with(tmp_path: Path, stage: str) -> None:
    pytest.importorskip("transformers", reason="the model of the example is one of transformers")
    script = str(SCRIPTS / "examples" / "rollouts_zero3.py")
    ended = run_script(tmp_path, script, "--rounds", "6", "--stage", stage, ranks=2)
    assert ended.returncode == 0, ended.output
    assert "version 7, weights equal bit by bit: yes" in ended.output
    assert ended.output.count("bits a weight") == 6


@pytest.mark.slow
def test_the_example_of_trl_trains(tmp_path: Path) -> None:
    for package in ("trl", "datasets", "accelerate"):
        pytest.importorskip(package, reason="the example is one of TRL")
    script = str(SCRIPTS / "examples" / "rollouts_grpo.py")
    ended = run_script(tmp_path, script, "--steps", "3", ranks=2, TRL_EXPERIMENTAL_SILENCE="1")
    assert ended.returncode == 0, ended.output
    assert ended.output.count("bits a weight") == 3 and "rewards 0." in ended.output
