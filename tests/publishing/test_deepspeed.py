"""DeepSpeed engines, ZeRO 0 to 3: exact versions of the weights in use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hybridcomp
from hybridcomp.errors import PublishError
from tests.publishing.made import error_of, full_disk, received, same
from tests.ranks import RunRanks, run_ranks
from tests.training import pipe_trainer
from tests.training.in_turn import digest
from tests.training.trainer import Job, digests, make_engine, parameters, train, train_step

STAGES = (0, 1, 2, 3)


def published(folder: Path, stages: tuple[int, ...], steps: int) -> list[str]:
    """Train at each stage with and without a publisher; return the differences."""
    wrong = []
    for stage in stages:
        job = Job(stage=stage, dtype="bf16", steps=steps, lr=1e-3)
        native = train(job)
        engine = make_engine(job)
        to = folder / f"stage{stage}"
        publisher = hybridcomp.publish(engine, to.as_uri())
        receiver = hybridcomp.WeightReceiver(to.as_uri())
        losses = []
        for step in range(steps):
            if step == steps // 2:
                publisher.close()
                publisher = hybridcomp.publish(engine, to.as_uri())
            losses.append(train_step(engine, job, step))
            summary = publisher.stepped()
            receiver.update()
            right = same(receiver, parameters(engine))
            # the restart finds the previous step's weights and continues the chain
            if not right or summary is None or summary.full != (step % 100 == 0):
                wrong.append(f"stage {stage} step {step} {summary}")
            dist.barrier()
        if losses != native.losses:
            wrong.append(f"stage {stage}: {losses} {native.losses}")
        engine.destroy()
    return wrong


def test_versions_are_what_the_model_computes_with(module_ranks: RunRanks, tmp_path: Path) -> None:
    assert module_ranks(2, published, tmp_path, STAGES, 4) == [[], []]


def fails_once(folder: Path) -> list[Any]:
    """Train with a version in the middle that cannot be written, and without versions."""
    found: list[Any] = []
    for stage in (1, 2):
        job = Job(stage=stage, dtype="bf16", steps=4, lr=1e-3, accumulation=2)
        native = train(job)
        block = {"publish": {"to": (folder / f"fails{stage}").as_uri(), "wait": True}}
        engine = make_engine(replace(job, block=block))
        losses, errors = [], 0
        for step in range(4):
            with full_disk(step == 1, rank=1):
                try:
                    losses.append(train_step(engine, job, step))
                except PublishError as error:
                    errors += "rank 1: OSError" in str(error)
                    losses.append(native.losses[step])
        weights = parameters(engine)
        right = digests(engine) == native.digests
        receiver = received(folder / f"fails{stage}")
        found.append((losses == native.losses, errors, right, same(receiver, weights),
                      engine.micro_steps, engine.global_steps))  # fmt: skip
        engine.destroy()
        dist.barrier()
    return found


def test_a_version_that_fails_changes_nothing_of_the_training(
    module_ranks: RunRanks, tmp_path: Path
) -> None:
    expected = [(True, 1, True, True, 8, 4)] * 2
    assert module_ranks(2, fails_once, tmp_path) == [expected] * 2


def pipeline_fails_once(folder: Path) -> list[Any]:
    """Do the same with a pipeline, whose step is one of many instructions."""
    import deepspeed

    job = pipe_trainer.Job(steps=4, bf16=True)
    (native,) = pipe_trainer.run([job])
    hybridcomp.install()
    block = {"publish": {"to": str(folder), "wait": True}}
    config = pipe_trainer.ds_config(replace(job, block=block), 1)
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(model=pipe_trainer.build(job, []), config=config)
    data, losses, told = pipe_trainer.batches(job, 0), [], []
    for step in range(job.steps):
        with full_disk(step == 1, rank=1):
            try:
                losses.append(float(engine.train_batch(data)))
            except PublishError as error:
                told.append(str(error))
                losses.append(native.losses[step])
    held = {name: digest(one) for name, one in engine.module.named_parameters()}
    steps = (engine.micro_steps, engine.global_steps)
    engine.destroy()
    hybridcomp.uninstall()
    right = held == native.parameters and losses == native.losses
    return [right, ["rank 1: OSError" in one for one in told], steps]


def test_a_version_that_fails_changes_nothing_of_a_pipeline(tmp_path: Path) -> None:
    found = run_ranks(2, pipeline_fails_once, tmp_path)
    assert [one[:2] for one in found] == [[True, [True]]] * 2, found


def other_parameters(folder: Path) -> list[str]:
    """Replace a Parameter in an engine after its first version; return this rank's error."""
    told = []
    for stage in (1, 3):
        engine = make_engine(Job(stage=stage, dtype="bf16"))
        publisher = hybridcomp.publish(engine, folder / str(stage))
        publisher.publish()
        engine.module.scale = torch.nn.Parameter(engine.module.scale.detach().clone())
        told.append(error_of(publisher.publish))
        publisher.close()
        engine.destroy()
    return told


def test_another_parameter_of_an_engine_is_refused_by_name(
    module_ranks: RunRanks, tmp_path: Path
) -> None:
    for told in module_ranks(2, other_parameters, tmp_path):
        assert [": scale: it is another Parameter" in one for one in told] == [True, True], told


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", [2, 4])
def test_more_full_versions_follow(tmp_path: Path, world_size: int, stage: int) -> None:
    """One before and one after the restart; ``test_chain`` publishes a thousand versions."""
    found = run_ranks(world_size, published, tmp_path, (stage,), 210, timeout=800.0)
    assert found == [[]] * world_size


def refused(folder: Path) -> list[str]:
    """Return errors of an fp32 engine with and without a dtype, and of bf16 with another."""
    told: list[str] = []

    def attempt(engine: Any, **given: Any) -> None:
        where = folder / str(len(told))
        told.append(error_of(lambda: hybridcomp.publish(engine, where, **given).publish()))

    engine = make_engine(Job(stage=2, dtype="fp32"))
    attempt(engine)
    attempt(engine, dtype="bf16")
    rounded = {name: value.to(torch.bfloat16) for name, value in parameters(engine).items()}
    assert same(received(folder / "1"), rounded)
    engine.destroy()
    engine = make_engine(Job(stage=1, dtype="bf16"))
    attempt(engine, dtype="fp16")
    attempt(engine, every=0)
    attempt(engine.module)
    engine.destroy()
    return told


def test_what_cannot_be_published_is_refused_in_one_line(
    module_ranks: RunRanks, tmp_path: Path
) -> None:
    told = module_ranks(2, refused, tmp_path)
    assert told[0] == told[1]
    fp32, cast, other, every, module = told[0]
    assert fp32 == (
        "publish.dtype: found None; scale is float32, and 16-bit weights are published; "
        'write "dtype": "bf16"'
    )
    assert cast == ""
    assert "publish.dtype: found 'fp16'; scale is bf16" in other
    assert every == "publish.every: found 0; expected a number of 1 or more"
    assert module.startswith("publish.engine: found Tiny; expected an engine of DeepSpeed")
