"""Simulate the published recurrences in one process, from their papers, on fp64 vectors.

An island's inner step is plain SGD on its quadratic, ``w -= lr * a_r * (w - b_r)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

NUMEL = 37
INNER = 0.05


@dataclass(frozen=True)
class Quadratic:
    """Curvature and minimum of an island's loss."""

    curvature: Tensor
    minimum: Tensor

    @classmethod
    def of(cls, island: int) -> Quadratic:
        generator = torch.Generator().manual_seed(100 + island)
        curvature = torch.rand(NUMEL, generator=generator, dtype=torch.float64) + 0.5
        return cls(curvature, torch.randn(NUMEL, generator=generator, dtype=torch.float64))

    def step(self, weights: Tensor) -> Tensor:
        return weights - INNER * self.curvature * (weights - self.minimum)


def first() -> Tensor:
    return torch.linspace(-1, 1, NUMEL, dtype=torch.float64)


Weights = list[Tensor]


def diloco(
    islands: int, steps: int, every: int, lr: float, momentum: float, nesterov: bool
) -> Weights:
    """Run algorithm 1 of DiLoCo with torch's SGD outside; local SGD at lr 1, momentum 0."""
    whole = torch.nn.Parameter(first())
    outer = torch.optim.SGD([whole], lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0)
    losses = [Quadratic.of(island) for island in range(islands)]
    local = [first() for _ in losses]
    for step in range(1, steps + 1):
        local = [loss.step(weights) for loss, weights in zip(losses, local, strict=True)]
        if step % every == 0:
            whole.grad = sum((whole.data - weights for weights in local), 0 * whole.data) / islands
            outer.step()
            local = [whole.data.clone() for _ in losses]
    return local


def streaming(
    islands: int, steps: int, every: int, fragments: int, delay: int, mix: float, lr: float
) -> Weights:
    """Run algorithm 2 of Streaming DiLoCo: fragments in turn, means ``delay`` steps late."""
    losses = [Quadratic.of(island) for island in range(islands)]
    local = [first() for _ in losses]
    whole, momentum = first(), torch.zeros(NUMEL, dtype=torch.float64)
    sent: dict[tuple[int, int], Tensor] = {}
    for step in range(1, steps + 1):
        local = [loss.step(weights) for loss, weights in zip(losses, local, strict=True)]
        for fragment in range(fragments):
            part = slice(NUMEL * fragment // fragments, NUMEL * (fragment + 1) // fragments)
            if step % every == every * fragment // fragments:
                deltas = [whole[part] - weights[part] for weights in local]
                sent[fragment, step] = torch.stack(deltas).mean(dim=0)
            if (mean := sent.pop((fragment, step - delay), None)) is not None:
                momentum[part] = 0.9 * momentum[part] + mean
                whole[part] -= lr * (mean + 0.9 * momentum[part])
                for weights in local:
                    weights[part] = mix * weights[part] + (1 - mix) * whole[part]
    return local


def sparseloco(
    islands: int, steps: int, every: int, decay: float, compress: Callable[[Tensor], Tensor]
) -> Weights:
    """Run algorithm 1 of SparseLoCo: the error memory decays and replaces momentum."""
    losses = [Quadratic.of(island) for island in range(islands)]
    local, whole = [first() for _ in losses], first()
    error = [torch.zeros_like(whole) for _ in losses]
    for step in range(1, steps + 1):
        local = [loss.step(weights) for loss, weights in zip(losses, local, strict=True)]
        if step % every == 0:
            error = [decay * e + whole - weights for e, weights in zip(error, local, strict=True)]
            sent = [compress(e) for e in error]
            error = [e - one for e, one in zip(error, sent, strict=True)]
            whole = whole - torch.stack(sent).mean(dim=0)
            local = [whole.clone() for _ in losses]
    return local


def wsp(islands: int, steps: int, every: int, staleness: int) -> Weights:
    """Run HetPipe's WSP with every island as far ahead as allowed.

    An island's weights are the initial ones, minus the means of all waves up to ``staleness`` ago,
    minus its own changes since.
    """
    losses = [Quadratic.of(island) for island in range(islands)]
    local = [first() for _ in losses]
    waves: list[Weights] = []  # by wave, each island's weight change
    current = [torch.zeros(NUMEL, dtype=torch.float64) for _ in losses]
    for step in range(1, steps + 1):
        moved = [loss.step(weights) for loss, weights in zip(losses, local, strict=True)]
        for island, (old, new) in enumerate(zip(local, moved, strict=True)):
            current[island] += old - new
        local = moved
        if step % every == 0:
            waves.append(current)
            current = [torch.zeros(NUMEL, dtype=torch.float64) for _ in losses]
            known = max(0, len(waves) - staleness)
            common = first()
            for wave in waves[:known]:
                common = common - torch.stack(wave).mean(dim=0)
            for island in range(islands):
                own = sum((wave[island] for wave in waves[known:]), torch.zeros_like(common))
                local[island] = common - own
    return local
