"""Scripts that set torch's default dtype or device: sums, residuals and reports do not follow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hybridcomp
from tests.patches.torch.trainer import digest
from tests.ranks import RunRanks

WIDTH, STEPS = 24, 3
BLOCKS: dict[str, dict[str, Any]] = {
    "residuals": {"codec": "blockint", "bits": 4, "error_feedback": True},
    "small residuals": {"codec": "blockint", "bits": 4, "error_feedback": {"bits": 8}},
    "bound": {"error_bound": 0.05},
    "low rank": {"codec": "powersgd", "rank": 2},
}


@contextmanager
def defaults(name: str) -> Iterator[None]:
    """Set a default: tensors on ``meta`` have no values, so none that is ours may be there."""
    try:
        if name == "meta":
            torch.set_default_device("meta")
        else:
            torch.set_default_dtype(getattr(torch, name))
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def trained(engine: str, block: dict[str, Any], default: str) -> str:
    """Return the parameters' digest after a few steps under a default."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(WIDTH, 65), nn.Tanh(), nn.Linear(65, WIDTH))
    model = DistributedDataParallel(model) if engine == "ddp" else fully_shard(model)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = torch.randn(STEPS, 4, WIDTH, generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with defaults(default):
        hybridcomp.attach(model, {"min_bytes": 0, "ledger": {"every": 1}, "dp": block})
        for batch in batches:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return digest(model)


def all_alike(engine: str) -> dict[str, set[str]]:
    """Return the digests of each block, one if no default changes anything."""
    kinds = {name: block for name, block in BLOCKS.items() if engine == "ddp" or name != "low rank"}
    every = ("float32", "bfloat16", "float64", "meta")
    return {
        name: {trained(engine, block, default) for default in every}
        for name, block in kinds.items()
    }


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_defaults_change_no_bit(on_ranks: RunRanks, engine: str) -> None:
    for found in on_ranks(2, all_alike, engine):
        assert all(len(digests) == 1 for digests in found.values()), found
