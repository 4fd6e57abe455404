"""Pipelines without a flush: recurrences, versions, staleness, checkpoints, data, errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("deepspeed")

from tests.pipelines import simulation
from tests.ranks import RunRanks
from tests.training import async_trainer
from tests.training.async_trainer import AsyncJob

#: name -> settings, micro-batches a step, momentum, simulation, versions held at most
RECURRENCES: dict[str, tuple[AsyncJob, simulation.Maker]] = {
    "pipedream": (AsyncJob({"versions": "stash"}), simulation.Simulation),
    "pipedream of 4": (AsyncJob({"versions": "stash"}, 4), simulation.Simulation),
    "2bw": (AsyncJob({"versions": 2}, 4), simulation.TwoVersions),
    "newest": (AsyncJob({"versions": 1}), simulation.Newest),
    "newest of 2": (AsyncJob({"versions": 1}, 2), simulation.Newest),
    "error feedback": (
        AsyncJob({"versions": 2, "correction": "error_feedback"}, 3),
        simulation.ErrorFeedback,
    ),
    "look ahead": (
        AsyncJob({"versions": "stash", "correction": "look_ahead"}, rate=0.2),
        simulation.Nesterov,
    ),
    "pipemare": (
        AsyncJob({"versions": 1, "correction": "pipemare", "anneal": 10}),
        simulation.PipeMare,
    ),
    "spike": (
        AsyncJob({"versions": 1, "correction": "spike"}, momentum=0.8, rate=0.02),
        simulation.Spike,
    ),
}


def held(job: AsyncJob, ahead: int) -> int:
    """Versions that a stage may hold, ``ahead`` before the last one."""
    assert job.pipeline is not None
    versions = job.pipeline["versions"]
    return ahead + 1 if versions == "stash" else versions


def late(job: AsyncJob, ahead: int) -> int:
    assert job.pipeline is not None
    return 1 if job.pipeline["versions"] == 2 else -(-ahead // job.micro_batches)


@pytest.mark.parametrize("stages", [2, 4])
def test_recurrences(stages: int, on_ranks: RunRanks) -> None:
    """Each equals its single-process simulation after 20 steps, and keeps its bounds."""
    jobs = [job for job, _ in RECURRENCES.values()]
    outcomes = on_ranks(stages, async_trainer.run, stages, jobs)
    for index, (name, (job, make)) in enumerate(RECURRENCES.items()):
        expected = make(job, stages).run()
        synchronous = simulation.Simulation(replace(job, micro_batches=10**6), stages)
        for stage, outcome in enumerate(rank[index] for rank in outcomes):
            (found,) = outcome.weights
            error = float((found - expected[stage]).abs().max())
            assert error < 1e-10, f"{name}, stage {stage}: {error}"
            ahead = stages - 1 - stage
            assert outcome.most_held <= held(job, ahead), f"{name}, stage {stage}"
            assert outcome.staleness == late(job, ahead), f"{name}, stage {stage}"
            assert not torch.equal(found, synchronous.weights[stage][0])
