"""``CachedEmbedding`` and ``RowOptimizer`` against torch's tables and optimizers, by the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridcomp.nn import CachedEmbedding, RowOptimizer
from hybridcomp.session import process
from tests.ranks import RunRanks

LOSSLESS = {"embed": "expcode", "preset": "none"}
METHODS = ("sgd", "adagrad", "sparse adagrad", "adam")


@contextmanager
def block(settings: Any) -> Iterator[None]:
    """The block of this process meanwhile; None: no block."""
    process.configure({"compression": settings} if settings else None)
    try:
        yield
    finally:
        process.configure(None)


def ranks() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def zipf(rows: int, count: int, seed: int, law: float = 1.1) -> Tensor:
    """``count`` ids, of which some are common and most are rare, in mixed places."""
    weights = np.cumsum(1.0 / np.arange(1, rows + 1) ** law)
    draws = np.searchsorted(weights, np.random.default_rng(seed).random(count) * weights[-1])
    return torch.from_numpy(np.random.default_rng(1).permutation(rows)[draws])


def torch_optimizer(method: str, table: nn.Module) -> torch.optim.Optimizer:
    if method == "sgd":
        return torch.optim.SGD(table.parameters(), lr=0.1)
    if method == "adam":
        return torch.optim.SparseAdam(list(table.parameters()), lr=0.1)
    return torch.optim.Adagrad(table.parameters(), lr=0.1)


def row_optimizer(method: str, table: CachedEmbedding) -> RowOptimizer:
    name: Any = method.removeprefix("sparse ")
    return RowOptimizer([table], name, lr=0.1, sparse_formula=method.startswith("sparse"))


def summed(own: Tensor, is_sparse: bool) -> Tensor:
    """The dense gradients of all ranks, added in rank order and averaged; sparse where asked."""
    world = ranks()[1]
    every = [torch.zeros_like(own) for _ in range(world)]
    if world > 1:
        dist.all_gather(every, own)
    else:
        every = [own]
    total = torch.zeros_like(own)
    for one in every:
        total += one
    return (total / world).to_sparse(1) if is_sparse else total / world


class Pair:
    """The table of torch, with dense gradients, and ours, stepped together."""

    def __init__(self, rows: int, width: int, method: str, **settings: Any) -> None:
        torch.manual_seed(0)
        self.theirs = nn.Embedding(rows, width, padding_idx=settings.get("padding_idx"))
        self.ours = CachedEmbedding.from_embedding(self.theirs, **settings)
        self.method = method
        self.optimizer = row_optimizer(method, self.ours)
        self.reference = torch_optimizer(method, self.theirs)
        self.outputs_equal = True

    def backward(self, ids: Tensor, seed: int) -> None:
        """Look ``ids`` up in both, compare, and send random gradients back."""
        gradients = torch.randn(
            (*ids.shape, self.ours.embedding_dim), generator=torch.Generator().manual_seed(seed)
        )
        theirs, ours = self.theirs(ids), self.ours(ids)
        self.outputs_equal &= torch.equal(theirs, ours)
        (theirs * gradients).sum().backward()
        (ours * gradients).sum().backward()

    def step(self) -> None:
        weight = self.theirs.weight
        own = torch.zeros_like(weight) if weight.grad is None else weight.grad
        weight.grad = summed(own, self.method in ("adam", "sparse adagrad"))
        self.reference.step()
        self.optimizer.step()
        self.reference.zero_grad()

    def weights_equal(self) -> bool:
        found = self.ours.full_weight()
        return found is None or torch.equal(found, self.theirs.weight.detach())


def trained(
    width: int, method: str, settings: Any, steps: int, ahead: int, folder: str | None = None
) -> tuple[bool, bool, float, int]:
    """Steps of both tables: whether outputs and weights are equal, hits, rows written back."""
    rank, world = ranks()
    rows, tokens = 3_001, 160
    with block(settings):
        pair = Pair(
            rows, width, method, resident=1_000 // world + 160, padding_idx=3, folder=folder
        )
        batches = [zipf(rows, tokens, 1000 * step + rank) for step in range(steps)]
        batches[1] = batches[1].view(8, 20).to(torch.int32)
        if rank == world - 1:
            batches[2] = batches[2][:0]
        batches[3] = torch.full((tokens,), 3)  # of padding alone
        for step in range(steps):
            if step >= 4 and ahead and (step - 4) % ahead == 0:
                for batch in batches[step : step + ahead]:
                    pair.ours.prefetch(batch)
            pair.backward(batches[step], 100 * step + rank)
            pair.step()
        figures = pair.ours.figures()
        return pair.outputs_equal, pair.weights_equal(), figures.hit_rate, figures.rows_out


@pytest.mark.parametrize("width", [7, 64, 256])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_is_torchs_table_to_the_bit(
    on_ranks: RunRanks, world: int, width: int, tmp_path: Path
) -> None:
    method = METHODS[(world + width) % len(METHODS)]
    settings = None if world == 1 else LOSSLESS
    call = (trained, width, method, settings, 60, 3, str(tmp_path))
    for outputs, weights, hits, written in on_ranks(world, *call):
        assert outputs and weights
        assert 0.3 < hits < 0.95 and written > 100
    assert not list(tmp_path.iterdir()), "mapped files have no name"
