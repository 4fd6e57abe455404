"""Gradients kept over a meeting get a warning, cleared ones none."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist

from tests.publishing.made import NIGHTLY
from tests.ranks import run_ranks
from tests.selection import by_day
from tests.sync.jobs import inside
from tests.sync.torch_job import Job
from tests.training.trainer import Job as DeepSpeedJob
from tests.training.trainer import batch, make_engine

BLOCK = inside(1, preset="local-sgd", every=2)
TOLD = "keeps gradients over the meeting after step 2 and adds those of other weights"


@contextlib.contextmanager
def told_of(*islands: int) -> Iterator[None]:
    """Expect a line on each of these single-rank islands, and none on the others."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        yield
    me = dist.get_rank()
    lines = [line for line in said.getvalue().splitlines() if "keeps gradients" in line]
    assert len(lines) == (me in islands), said.getvalue()
    assert all(f"sync: island {me} {TOLD}" in line for line in lines)


def passed(job: Job, between: Callable[[], object] = lambda: None) -> None:
    loss = job.model(torch.arange(4)[None]).square().mean()
    between()
    torch.autograd.backward(loss)


def accumulates(engine: str) -> None:
    """Run two micro-batches per step, clearing gradients in each way that torch has."""
    for to_none in (True, False):
        job = Job(BLOCK, engine).build()
        with told_of():
            for _ in range(3):
                passed(job)
                passed(job)
                job.optimizer.step()
                job.optimizer.zero_grad(set_to_none=to_none)
            for _ in range(3):  # gradients are cleared just before the step
                passed(job, functools.partial(job.optimizer.zero_grad, to_none))
                job.optimizer.step()
        assert job.meetings.clock == 6
        job.attached.detach()  # type: ignore[union-attr]


def keeps(engine: str) -> None:
    """Let the second island's script keep one gradient, or all."""
    for left, told in ((1, (0, 1)), (0, (0,))):
        job = Job(BLOCK, engine).build()
        with told_of(*told):
            for _ in range(4):
                passed(job)
                job.optimizer.step()
                for parameter in list(job.model.parameters())[left:] if dist.get_rank() else ():
                    parameter.grad = None
        job.attached.detach()  # type: ignore[union-attr]


def detached() -> None:
    """Stop watching a model that is detached after a meeting."""
    job = Job(BLOCK).build()
    with told_of():
        for _ in range(2):
            passed(job)
            job.optimizer.step()
        job.attached.detach()  # type: ignore[union-attr]
        passed(job)
    assert not any(parameter._backward_hooks for parameter in job.model.parameters())


def of_torch() -> None:
    for engine in ("ddp", "fsdp2"):
        accumulates(engine)
        keeps(engine)
    detached()


def test_under_ddp_and_fsdp2() -> None:
    run_ranks(2, of_torch)


def of_deepspeed(stage: int) -> None:
    """Train under DeepSpeed, which clears gradients in the steps after which islands meet."""
    job = DeepSpeedJob(stage, block=BLOCK, ds_json={"gradient_accumulation_steps": 3})
    engine = make_engine(job)
    kept = []
    for micro in range(12):
        values, targets = batch(dist.get_rank(), micro, torch.float32)
        engine.backward((engine(values) - targets).square().mean())
        engine.step()
        held = [one.grad for one in engine.module.parameters() if one.grad is not None]
        kept.append(any(bool(one.any()) for one in held))
    assert not any(kept[2::3]) and engine.global_steps == 4
    engine.destroy()


@pytest.mark.parametrize("stage", by_day([0, 2], [2]))
def test_under_deepspeed(stage: int) -> None:
    run_ranks(2, of_deepspeed, stage)


def of_megatron(kinds: tuple[bool, ...]) -> None:
    from tests.sync.mcore_job import MegatronIslandJob
    from tests.sync.test_mcore import groups_of
    from tests.training.mcore_trainer import Job as MegatronJob
    from tests.training.mcore_trainer import prepare

    prepare()
    for sharded in kinds:
        job = MegatronJob(layers=1, distributed_optimizer=sharded, block=BLOCK)
        with groups_of(job):
            ours = MegatronIslandJob(job)
            with told_of():
                ours.train(5)
        with groups_of(job):
            ours = MegatronIslandJob(job)
            with told_of(0, 1):
                ours.train(2)
                for chunk in ours.chunks:
                    chunk.zero_grad_buffer = lambda: None
                ours.train(3)


@pytest.mark.skipif(
    find_spec("megatron") is None or find_spec("megatron.core") is None,
    reason="megatron-core is not installed",
)
def test_under_megatron() -> None:
    run_ranks(2, of_megatron, (False, True) if NIGHTLY else (True,), timeout=600.0)
