"""Islands of one job that publish: the first does, between meetings as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hybridcomp
from tests.ranks import run_ranks
from tests.sync.torch_job import Job


def gathered(weights: Tensor) -> list[Tensor]:
    found = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(found, weights)
    return found


def published(folder: Path, engine: str) -> None:
    """Publish after steps at which islands have met, and at which they have not."""
    block: dict[str, Any] = {
        "sync": {"preset": "local-sgd", "islands": 2, "every": 3},
        "publish": {"to": str(folder), "every": 2, "dtype": "bf16"},
        "min_bytes": 0,
        "ledger": {"every": 3},
    }
    job, kept = Job(block, engine).build(), []
    for step in range(2, 9, 2):
        first, *_, last = gathered(job.train(2).weights())
        assert torch.equal(first, last) == (step == 6)
        kept.append(first.to(torch.bfloat16))
    names = [name.removeprefix("module.") for name, _ in job.model.named_parameters()]
    hybridcomp.detach(job.model)
    dist.barrier()  # all is written
    receiver = hybridcomp.WeightReceiver(folder)
    for version, expected in enumerate(kept, 1):
        receiver.update(version)
        whole = dict(receiver.tensors())
        assert torch.equal(torch.cat([whole[name].flatten() for name in names]), expected)


def both(folder: Path) -> None:
    published(folder / "ddp", "ddp")
    published(folder / "fsdp2", "fsdp2")


def test_the_first_island_publishes(tmp_path: Path) -> None:
    run_ranks(4, both, tmp_path)
