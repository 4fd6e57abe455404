"""Islands under DDP and FSDP2: exact where nothing is lost, alike, restored, and bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import hybridcomp
from tests.ranks import run_ranks
from tests.sync.torch_job import Job

LOCAL: dict[str, Any] = {"preset": "local-sgd", "every": 1}


def block(**sync: Any) -> dict[str, Any]:
    return {"sync": {"islands": 2, **sync}, "min_bytes": 0, "ledger": {"every": 1_000_000}}


def every_step(engine: str) -> None:
    """Islands that meet every step, with SGD inside and outside, are one job."""
    native = Job(None, engine).build().train(6).weights()
    for codec in ("none", "expcode"):
        # islands begin with other weights: all take those of the first
        seed = 0 if dist.get_rank() < 2 else 5
        job = Job(block(**LOCAL, codec=codec), engine, seed=seed).build().train(6)
        torch.testing.assert_close(job.weights(), native, rtol=0, atol=1e-6)
        assert job.attached is not None
        hybridcomp.detach(job.model)
    accumulated = Job(None, engine).build().train(3, micro_batches=2).weights()
    job = Job(block(**LOCAL), engine).build().train(3, micro_batches=2)
    torch.testing.assert_close(job.weights(), accumulated, rtol=0, atol=1e-6)
    assert job.meetings.clock == 3


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_every_step_is_the_native_job(engine: str) -> None:
    run_ranks(4, every_step, engine)
