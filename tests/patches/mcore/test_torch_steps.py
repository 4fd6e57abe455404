"""Jobs on megatron-core with torch's optimizers: each step counts once, on all ranks."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from hybridcomp.errors import ConfigError
from hybridcomp.patches.mcore import torch_steps
from hybridcomp.session import process
from tests.ranks import Trained
from tests.selection import by_day
from tests.stand_ins.link_clock import clock
from tests.training import mcore_trainer
from tests.training.mcore_trainer import Job

pytestmark = pytest.mark.skipif(
    find_spec("megatron") is None or find_spec("megatron.core") is None, reason="no megatron-core"
)
#: steps after which a job says that none was counted; steps of the others
STEPS, FEW = 11, 5
B8: dict[str, Any] = {"codec": "blockint", "bits": 8}
LATER = {"start_step": 3, "min_bytes": 0}
RAMP = {"codec": "blockint", "bits": 4, "ramp": {"from": 8, "steps": 6}}

#: name -> job, and how its optimizer is created
JOBS: dict[str, tuple[Job, str]] = {
    "TP": (Job(tp=2, steps=FEW, block={"tp": B8, **LATER}), "one"),
    "TP, two optimizers": (Job(tp=2, steps=FEW, block={"tp": B8, **LATER}), "two"),
    "TP, one optimizer each": (Job(tp=2, steps=FEW, block={"tp": B8, **LATER}), "each"),
    "TP, nobody's": (Job(tp=2, steps=STEPS, block={"tp": B8, **LATER}), "nobody's"),
    "TP, recommended": (Job(tp=2, steps=STEPS, link=(0.02, 0.01),
                            block={"preset": "recommended", "min_bytes": 0}), "one"),
    "PP": (Job(pp=2, steps=FEW, block={"pp": B8, **LATER}), "one"),
    "PP, two optimizers": (Job(pp=2, steps=FEW, block={"pp": B8, **LATER}), "two"),
    "DP": (Job(steps=FEW, block={"dp": RAMP, **LATER}), "wrapped"),
    "DP, nobody's": (Job(steps=STEPS, block={"dp": RAMP, **LATER}), "wrapped, nobody's"),
    "DP, Megatron's": (Job(steps=FEW, block={"dp": RAMP, **LATER}), "Megatron's"),
    "TP, islands": (Job(tp=2, steps=1, block={"sync": {"islands": 2}}), "one"),
    # hooks of parameters keep their optimizers alive: run these after the jobs without hooks
    "TP, in backward": (Job(tp=2, steps=FEW, micro_batches=1,
                            block={"tp": B8, **LATER}), "in backward"),
}  # fmt: skip


class Foreign:
    """An optimizer outside torch."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=1e-3)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


class Several:
    """Optimizers that step one after the other."""

    def __init__(self, every: list[torch.optim.Optimizer]) -> None:
        self.every = every

    def step(self) -> None:
        for optimizer in self.every:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.every:
            optimizer.zero_grad()


class Wrapped:
    """Optimizer of the gradients that Megatron's DistributedDataParallel reduced."""

    def __init__(self, inner: Any, model: Any) -> None:
        self.inner, self.model = inner, model

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = parameter.main_grad
        self.inner.step()

    def zero_grad(self) -> None:
        self.inner.zero_grad()
        self.model.zero_grad_buffer()


class InBackward:
    """An optimizer per parameter, which steps as soon as its gradient is ready."""

    def __init__(self, parameters: list[Any]) -> None:
        self.every = {parameter: torch.optim.SGD([parameter], lr=1e-3) for parameter in parameters}
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self.update)

    def update(self, parameter: Any) -> None:
        self.every[parameter].step()
        parameter.grad = None

    def step(self) -> None:
        """Do nothing: all have stepped."""

    def zero_grad(self) -> None:
        """Do nothing: no gradient is kept."""


def build(job: Job, kind: str) -> tuple[Any, Any]:
    """Build a bare or wrapped GPTModel, and its optimizer."""
    config = mcore_trainer.model_config(job)
    model = mcore_trainer._model(job, config, 0)
    if kind == "Megatron's":
        (wrapped,), optimizer = mcore_trainer.wrap(job, config, [model])
        return wrapped, optimizer
    parameters = list(model.parameters())
    if kind.startswith("wrapped"):
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )

        settings = DistributedDataParallelConfig(overlap_grad_reduce=False)
        wrapped = DistributedDataParallel(config, settings, model)
        config.finalize_model_grads_func = finalize_model_grads
        foreign = "nobody" in kind
        inner = Foreign(parameters) if foreign else torch.optim.AdamW(parameters, lr=1e-3)
        return wrapped, Wrapped(inner, wrapped)
    if kind == "one":
        return model, torch.optim.AdamW(parameters, lr=1e-3)
    if kind == "nobody's":
        return model, Foreign(parameters)
    if kind == "in backward":
        return model, InBackward(parameters)
    parts = [parameters[::2], parameters[1::2]] if kind == "two" else [[p] for p in parameters]
    return model, Several([torch.optim.SGD(part, lr=1e-3) for part in parts])


def trained(name: str) -> tuple[Any, ...]:
    """Return counted steps, whether messages were encoded, the log about steps, the last line."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    job, kind = JOBS[name]
    link = contextlib.nullcontext() if job.link is None else clock(*job.link)
    with link, mcore_trainer.armed(job), io.StringIO() as told:
        with contextlib.redirect_stdout(told):
            mcore_trainer.initialize(job)
            model, optimizer = build(job, kind)
            model.eval()
            for step in range(job.steps):
                optimizer.zero_grad()
                get_forward_backward_func()(
                    forward_step_func=mcore_trainer.forward_step,
                    data_iterator=mcore_trainer.batches(job, step), model=model,
                    num_microbatches=job.micro_batches, seq_length=mcore_trainer.LENGTH,
                    micro_batch_size=mcore_trainer.MICRO_BATCH, forward_only=False,
                )  # fmt: skip
                try:
                    optimizer.step()
                except ConfigError as error:
                    return (str(error),)
            channels = process.current()
            assert channels is not None
            entries = channels.ledger.interval.values()
            encoded = any(entry.messages > entry.native for entry in entries)
            reason = channels.tuner.idle_reason(channels.step)
        lines = [line for line in told.getvalue().splitlines() if "no optimizer step" in line]
        return channels.step, encoded, len(lines), reason


def run(names: list[str]) -> list[tuple[Any, ...]]:
    mcore_trainer.prepare()
    return [trained(name) for name in names]


@pytest.fixture(scope="module")
def outcomes() -> Iterator[Trained]:
    with Trained(2, run) as found:
        yield found


@pytest.mark.parametrize("name", by_day(["TP, nobody's", "DP, nobody's"], ["DP, nobody's"]))
def test_steps_that_nobody_hears_of_are_told(name: str, outcomes: Trained) -> None:
    for rank, (steps, encoded, said, reason) in enumerate(outcomes(name)):
        assert (steps, encoded, said) == (0, False, rank == 0)
        passes = STEPS * (1 if name.startswith("DP") else JOBS[name][0].micro_batches)
        assert reason == f"no optimizer step was counted in the last {passes} passes with gradients"


def test_islands_want_megatrons_optimizer(outcomes: Trained) -> None:
    for (told,) in outcomes("TP, islands"):
        assert "compression.sync: found steps of AdamW" in told and torch_steps.ISLANDS in told


TORCHS = [name for name in JOBS if "nobody" not in name and "islands" not in name]
DAY = ["TP, two optimizers", "PP", "DP", "DP, Megatron's", "TP, in backward"]


@pytest.mark.parametrize("name", by_day(TORCHS, DAY))
def test_steps_of_torchs_optimizers_count_once(name: str, outcomes: Trained) -> None:
    for steps, encoded, said, _ in outcomes(name):
        assert (steps, encoded, said) == (JOBS[name][0].steps, True, 0)
