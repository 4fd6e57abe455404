"""The reimplemented peers by name; each updates a model after its backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.peers import gathers, reductions
from benchmarks.peers.flat import Flat
from benchmarks.peers.wire import Nodes, Wire


@dataclass(frozen=True)
class Settings:
    """Settings of the run that methods use."""

    per_node: int
    clip: float  # limit of the global gradient norm, 0: none
    adam: dict[str, Any]  # lr, betas, eps, weight_decay


class Sharded:
    """ZeRO-like sharded optimizer: reduce gradients to shards, update, gather weights.

    The schedule sets the learning rate of ``optimizer``.
    """

    def __init__(
        self, model: nn.Module, settings: Settings, reduction: reductions.TwoLevel,
        gather: Callable[[Tensor], gathers.Gather],
    ) -> None:  # fmt: skip
        self.model, self._clip, self._reduction = model, settings.clip, reduction
        ranks, rank = dist.get_world_size(), dist.get_rank()
        self._flat = Flat(model.parameters(), ranks)
        weights = self._flat.weights()
        share = weights[rank * self._flat.share : (rank + 1) * self._flat.share]
        self._share = nn.Parameter(share.clone())
        self._gather = gather(weights)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW([self._share], **settings.adam)

    def step(self) -> None:
        """Reduce, clip by the norm over all shards, update, gather, clear gradients."""
        gradient = self._reduction.reduce(self._flat.gradients())
        if self._clip:
            squares = gradient.square().sum()
            dist.all_reduce(squares)
            gradient *= min(1.0, self._clip / (float(squares.sqrt()) + 1e-6))
        self._share.grad = gradient
        self.optimizer.step()
        self._flat.write(self._gather.gather(self._share.detach()))
        self.model.zero_grad(set_to_none=False)


@dataclass(frozen=True)
class Peer:
    """One row of the table, reimplemented from its paper."""

    what: str  # shown in logs and tables
    source: str
    reduction: Callable[[Wire, Nodes], reductions.TwoLevel]
    gather: Callable[[Wire, nn.Module, Tensor], gathers.Gather]

    def make(self, model: nn.Module, wire: Wire, settings: Settings) -> Sharded:
        """Return the method for a model; all ranks call it together."""
        reduction = self.reduction(wire, Nodes(settings.per_node))
        return Sharded(model, settings, reduction, lambda w: self.gather(wire, model, w))


def _native(wire: Wire, model: nn.Module, _: Tensor) -> gathers.Gather:
    return gathers.Native(wire, next(model.parameters()).dtype)


PEERS: dict[str, Peer] = {
    "qgz": Peer(
        "qgZ: 4-bit gradients in two levels, weights native",
        "arXiv 2306.10209, section 3.3",
        reductions.qgz,
        _native,
    ),
    "qgz-qwz": Peer(
        "qgZ and qwZ: 4-bit gradients, 8-bit weights",
        "arXiv 2306.10209, sections 3.1 and 3.3",
        reductions.qgz,
        lambda wire, *_: gathers.QwZ(wire),
    ),
    "sdp4bit": Peer(
        "SDP4Bit: 4-bit weight differences, gradients 8 bits in a node, 4 rotated between",
        "arXiv 2410.15526, sections 3.1 and 3.2",
        reductions.sdp4bit,
        lambda wire, _, weights: gathers.Differences(wire, weights),
    ),
}
