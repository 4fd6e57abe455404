"""Compare CachedEmbedding with torch's tables; draw ids by Zipf's law; set a process's block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridcomp.nn import CachedEmbedding, RowOptimizer
from hybridcomp.session import process

LOSSLESS = {"embed": "expcode", "preset": "none"}


@contextmanager
def block(settings: Any) -> Iterator[None]:
    """Set the block of this process in the body; None: no block."""
    process.configure({"compression": settings} if settings else None)
    try:
        yield
    finally:
        process.configure(None)


def ranks() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def zipf(rows: int, count: int, seed: int, law: float = 1.1) -> Tensor:
    """Draw ``count`` ids, few of them frequent and most rare."""
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


def summed(own: Tensor) -> Tensor:
    """Average the gradients of all ranks, added in rank order."""
    world = ranks()[1]
    if world == 1:
        return own
    every = [torch.zeros_like(own) for _ in range(world)]
    dist.all_gather(every, own)
    total = torch.zeros_like(own)
    for gradient in every:
        total += gradient
    return total / world


class Pair:
    """A table of torch and a CachedEmbedding made from it, with equal batches and gradients."""

    def __init__(
        self, theirs: nn.Embedding | nn.EmbeddingBag, method: str, **settings: Any
    ) -> None:
        self.theirs, self.method = theirs, method
        self.ours = CachedEmbedding.from_embedding(theirs, **settings)
        self.optimizer = row_optimizer(method, self.ours)
        self.reference = torch_optimizer(method, theirs)
        self.outputs_equal = True
        self.gradient = torch.zeros_like(theirs.weight)

    def backward(self, ids: Tensor, seed: int, *more: Tensor | None) -> None:
        """Look ``ids`` up in both, compare, and send random gradients back.

        The gradients of torch's table are added up over the ranks, a micro-batch at a time.
        """
        weights = [None if values is None else values.clone() for values in more]
        for values in (*more, *weights):
            if values is not None and values.is_floating_point():
                values.requires_grad_()
        theirs, ours = self.theirs(ids, *more), self.ours(ids, *weights)
        self.outputs_equal &= torch.equal(theirs, ours)
        gradients = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(seed))
        (theirs * gradients).sum().backward()
        (ours * gradients).sum().backward()
        for a, b in zip(more, weights, strict=True):
            if a is not None and a.is_floating_point():
                self.outputs_equal &= torch.equal(a.grad, b.grad)  # type: ignore[arg-type, union-attr]
        weight = self.theirs.weight
        own = torch.zeros_like(weight) if weight.grad is None else weight.grad
        self.gradient += summed(own)
        weight.grad = None

    def step(self) -> None:
        is_sparse = self.method in ("adam", "sparse adagrad")
        self.theirs.weight.grad = self.gradient.to_sparse(1) if is_sparse else self.gradient
        self.reference.step()
        self.optimizer.step()
        self.theirs.weight.grad = None
        self.gradient = torch.zeros_like(self.theirs.weight)

    def weights_equal(self) -> bool:
        weight = self.ours.full_weight()
        return weight is None or torch.equal(weight, self.theirs.weight.detach())
