"""Islands under megatron-core, in the tiny trainings of ``tests.training.mcore_trainer``."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hybridcomp
from hybridcomp.session import process
from hybridcomp.session.engine_session import EngineSession
from tests.sync import simulated
from tests.training.mcore_trainer import (
    Job,
    armed,
    build,
    initialize,
    model_config,
    train_step,
    wrap,
)

#: makes Adam plain SGD, which the distributed optimizer does not accept
SHARDED: dict[str, Any] = {"optimizer": "adam", "linear": True, "distributed_optimizer": True}


def block(**sync: Any) -> dict[str, Any]:
    return {"sync": {"islands": 1, **sync}, "min_bytes": 0}


class MegatronIslandJob:
    """A rank's model chunks and optimizer; build and train it inside ``armed(job)``."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.step = 0
        self.chunks, self.optimizer = build(job)

    def train(self, steps: int) -> MegatronIslandJob:
        for _ in range(steps):
            train_step(self.job, self.chunks, self.optimizer, self.step)
            self.step += 1
        return self

    @property
    def session(self) -> EngineSession:
        found = process.own_session()
        assert found is not None
        return found

    @property
    def meetings(self) -> Any:
        """Return the meetings of islands, in one job or between jobs."""
        (found,) = self.session.followers.stateful
        return found

    def weights(self) -> Tensor:
        """Return all weights of this rank, gathered first where the next forward pass would."""
        for chunk in self.chunks if self.job.overlap and self.job.distributed_optimizer else []:
            chunk.start_param_sync(force_sync=True)
        found = [p.detach().float().flatten() for c in self.chunks for p in c.module.parameters()]
        return torch.cat(found).clone()


def weights_after(job: Job, first: int = 0) -> Tensor:
    """Train ``job`` from the weights of seed ``first``; return this rank's weights."""
    with armed(job):
        initialize(job)
        torch.manual_seed(first)
        return MegatronIslandJob(job).train(job.steps).weights()


class QuadraticModel(nn.Module):
    """A vector with an island's loss of ``tests.sync.simulated``."""

    def __init__(self, island: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.weights = nn.Parameter(simulated.first().to(dtype))
        self.weights.tensor_model_parallel = False  # type: ignore[attr-defined]
        self.quadratic = simulated.Quadratic.of(island)

    def forward(self) -> Tensor:
        apart = self.weights - self.quadratic.minimum
        return (self.quadratic.curvature * apart.square()).sum() / 2


def quadratic_after(told: dict[str, Any], steps: int, cp: int = 1, sharded: bool = False) -> Tensor:
    """Train a QuadraticModel in islands of ``cp`` context ranks; return its weights.

    It runs in fp64, or ``sharded`` by the distributed optimizer in fp32.
    """
    job = Job(clip=0.0, optimizer="sgd", lr=simulated.INNER, cp=cp, block=told)
    dtype = torch.float64
    if sharded:
        job, dtype = dataclasses.replace(job, **SHARDED), torch.float32
    with armed(job):
        initialize(job)
        model = QuadraticModel(dist.get_rank() // cp, dtype)
        (chunk,), optimizer = wrap(job, model_config(job), [model])
        for _ in range(steps):
            chunk.zero_grad_buffer()
            optimizer.zero_grad()
            torch.autograd.backward(chunk())
            chunk.finish_grad_sync()
            optimizer.step()
        found: Tensor = chunk.module.weights.detach().clone()
    return found


def inner(job: MegatronIslandJob) -> list[torch.optim.Optimizer]:
    """Return torch's optimizers inside Megatron's."""
    return [one.optimizer for one in job.optimizer.chained_optimizers]


def held(job: MegatronIslandJob) -> list[Tensor]:
    """Return the weights of the model and of its optimizers, in one order."""
    found = [p.data for chunk in job.chunks for p in chunk.module.parameters()]
    groups = [group for one in inner(job) for group in one.param_groups]
    return found + [p.data for group in groups for p in group["params"]]


def restarted(job: Job, folder: str, at: int) -> tuple[Tensor, Tensor]:
    """Return the weights of a run, and of one saved at step ``at`` and resumed in new objects."""
    with armed(job):
        initialize(job)
        whole = MegatronIslandJob(job).train(at)
        hybridcomp.save_state(folder)
        kept = [values.clone() for values in held(whole)]
        adam = [copy.deepcopy(one.state_dict()) for one in inner(whole)]
        expected = whole.train(job.steps - at).weights()
        process.configure({"ledger": {"every": 1_000_000}, **(job.block or {})})
        torch.manual_seed(99)
        again = MegatronIslandJob(job)
        for values, state in zip(held(again), kept, strict=True):
            values.copy_(state)
        for one, saved in zip(inner(again), adam, strict=True):
            one.load_state_dict(saved)
        hybridcomp.load_state(folder)
        again.step = at
        return expected, again.train(job.steps - at).weights()
