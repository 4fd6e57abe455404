"""Adapt a peer to the protocol of the example's training loop, and write its ledger."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt.data import Batch, Share
from gpt.loop import mean_over_ranks
from torch import Tensor, nn

from benchmarks.peers.methods import Sharded
from benchmarks.peers.wire import Wire


class Engine:
    """Subset of DeepSpeed's engine that the loop uses."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.device = device
        self.monitor = type("Monitor", (), {"enabled": False})()
        self._optimizer = optimizer

    def get_lr(self) -> list[float]:
        """Return the learning rate of every parameter group."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]


class PeerTrainer:
    """Runs forward, backward, the method's step and the schedule's step, in DeepSpeed's order."""

    def __init__(
        self, method: Sharded, wire: Wire, share: Share, loss: Callable[[Tensor, Tensor], Tensor],
        scheduler: Any, device: torch.device | None = None,
    ) -> None:  # fmt: skip
        self.engine: Any = Engine(method.optimizer, device or torch.device("cpu"))
        self.share = share
        self._method, self._wire, self._loss, self._scheduler = method, wire, loss, scheduler
        self.raw_nbytes = 0.0
        native = sum(p.nbytes for p in method.model.parameters())
        self._native = 2 * native * (share.world_size - 1) / share.world_size

    def step(self, batches: Iterator[Batch]) -> float:
        """Make one optimizer step; return the loss, averaged over micro-batches and ranks."""
        losses, model = [], self._method.model
        count = self.share.micro_batches
        for tokens, labels in batches:
            loss = self._loss(model(tokens), labels)
            (loss / count).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        self._wire.counting = True
        self._method.step()
        self._wire.counting = False
        self.raw_nbytes += self._native
        if self._scheduler is not None:
            self._scheduler.step()
        return mean_over_ranks(losses)

    def evaluate(self, batches: Iterator[Batch]) -> float:
        """Return the loss of a forward pass."""
        model: nn.Module = self._method.model
        model.eval()
        with torch.no_grad():
            losses = [self._loss(model(tokens), labels) for tokens, labels in batches]
        model.train()
        return mean_over_ranks(losses)

    def write_ledger(self, path: Path, name: str) -> None:
        """Write the totals of all ranks in hybridcomp's ledger format; collective.

        All bytes count under ``dp``; native is an all-reduce in the parameters' dtype.
        """
        write_ledger(path, name, self.raw_nbytes, self._wire.sent, self.engine.device)


def write_ledger(path: Path, name: str, raw: float, sent: float, device: torch.device) -> None:
    """Write native and sent bytes, summed over all ranks, as ``dp``."""
    totals = torch.tensor([raw, sent], dtype=torch.float64, device=device)
    dist.all_reduce(totals)
    if dist.get_rank() != 0:
        return
    raw, sent = totals.tolist()
    ratio = raw / sent if sent else None
    row = {"codec": name, "raw_MB": raw / 1e6, "wire_MB": sent / 1e6, "ratio": ratio}
    path.write_text(json.dumps({"summary": True, "dimensions": {"dp": {"forward": row}}}) + "\n")
