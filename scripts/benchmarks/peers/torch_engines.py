"""Train under torch's engines with torch's compression: DDP hooks, 16-bit sums of FSDP2.

Model, optimizer and loop are those of ``train_gpt.py --engine``; only the gradient reduction
differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt.data import Batch
from gpt.model import GPT
from gpt.torch_engines import BUCKET_MB, Engine, Kind, TorchTrainer
from torch import Tensor

from benchmarks.peers import hooks
from benchmarks.peers.trainer import write_ledger
from benchmarks.peers.wire import Wire


@dataclass(frozen=True)
class Native:
    """One of torch's compression methods under one of its engines."""

    what: str  # shown in logs and tables
    source: str
    #: registers a hook on a DDP model; second argument: native iterations before the hook starts
    hook: Callable[[Any, int], Any] | None = None
    sums: torch.dtype | None = None  # reduce dtype of FSDP2


def _power_sgd(rank: int) -> Native:
    return Native(
        f"PowerSGD rank {rank}, one bucket, native for the first 10% of steps",
        "torch powerSGD_hook; arXiv 1905.13727",
        lambda model, start: hooks.power_sgd(model, rank, start),
    )


def _sums_in_bf16(engine: str) -> Native:
    return Native(
        f"{engine}, gradients sent and summed in bf16",
        "torch MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)",
        sums=torch.bfloat16,
    )


METHODS: dict[Kind, dict[str, Native]] = {
    "ddp": {
        "fp16": Native(
            "torch DDP, fp16 hook, one bucket",
            "torch fp16_compress_hook",
            lambda model, _: hooks.fp16(model),
        ),
        "bf16": Native(
            "torch DDP, bf16 hook for gloo, one bucket",
            "as torch bf16_compress_hook",
            lambda model, _: hooks.bf16(model),
        ),
        **{f"powersgd-{rank}": _power_sgd(rank) for rank in (4, 16, 32)},
    },
    "fsdp2": {"bf16": _sums_in_bf16("FSDP2")},
    "hsdp": {"bf16": _sums_in_bf16("HSDP")},
}


def engine_of(
    kind: Kind, method: Native, model: GPT, settings: dict[str, Any], start: int
) -> Engine:
    """Wrap ``model`` in ``kind`` with ``method``; ``start``: native iterations before the hook."""
    bucket = BUCKET_MB if method.hook is None else hooks.ONE_BUCKET_MB
    engine = Engine(kind, model, settings, sums=method.sums, bucket_mb=bucket)
    if method.hook is not None:
        method.hook(engine.model, start)
    return engine


class CountedTrainer(TorchTrainer):
    """A trainer that counts its bytes, for a ledger in hybridcomp's format."""

    def __init__(
        self, engine: Engine, loss: Callable[[Tensor, Tensor], Tensor], settings: dict[str, Any]
    ) -> None:
        super().__init__(engine, loss, settings)
        self._wire, self._steps = Wire(counting=False), 0

    def step(self, batches: Iterator[Batch]) -> float:
        """Make one optimizer step and count all messages but the averaging of the loss."""
        self._steps += 1
        return super().step(batches)

    def _train(self, batches: Iterator[Batch]) -> list[Tensor]:
        self._wire.counting = True
        with self._wire.watching():
            losses = super()._train(batches)
        self._wire.counting = False
        return losses

    def write_ledger(self, path: Path, name: str) -> None:
        """Write the totals of all ranks; native gradients count as fp32. Collective."""
        size = dist.get_world_size()
        raw = self._wire.gathered + 4 * self._wire.summed
        if self.engine.kind == "ddp":
            gradients = 4 * sum(p.numel() for p in self.engine.model.parameters())
            raw = 2 * gradients * (size - 1) / size * self._steps
        write_ledger(path, name, raw, self._wire.sent, self.engine.device)
