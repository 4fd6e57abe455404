#!/usr/bin/env python3
"""Lightning over DDP, FSDP2 or DeepSpeed; the ledger's figures go to its loggers.

HYBRIDCOMP_CONFIG=scripts/examples/ddp.json torchrun --nproc-per-node 2 -m hybridcomp.run \\
    scripts/examples/train_lightning.py
HYBRIDCOMP_CONFIG=scripts/examples/fsdp2.json torchrun --nproc-per-node 2 -m hybridcomp.run \\
    scripts/examples/train_lightning.py --strategy fsdp2
DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 -m hybridcomp.run \\
    scripts/examples/train_lightning.py --strategy deepspeed
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy
from on_cpu import deepspeed_on_cpu, lightning_accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from hybridcomp.patches.trainers.lightning import LedgerCallback

ZERO = Path(__file__).with_name("lightning_zero.json")


class Classifier(lightning.LightningModule):  # type: ignore[misc]  # not installed for mypy
    """A small classifier."""

    def __init__(self, fsdp2: bool) -> None:
        super().__init__()
        self.fsdp2 = fsdp2
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 16))

    def configure_model(self) -> None:
        """Shard the module; ModelParallelStrategy leaves this to the module."""
        if self.fsdp2:
            mesh = self.device_mesh["data_parallel"]
            for layer in self.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.layers, mesh=mesh)

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        points, labels = batch
        loss = nn.functional.cross_entropy(self.layers(points), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def strategy_of(name: str) -> Any:
    """Return ``lightning.Trainer``'s ``strategy`` by its name."""
    if name == "deepspeed":
        deepspeed_on_cpu()
        return DeepSpeedStrategy(config=json.loads(ZERO.read_text()))
    if name == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="ddp", choices=["ddp", "fsdp2", "deepspeed"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", default="runs/lightning")
    arguments = parser.parse_args()
    lightning.seed_everything(0)
    points = torch.randn(arguments.steps * 64, 64)
    labels = (points @ torch.randn(64, 16)).argmax(1)
    logger = CSVLogger(arguments.output)
    trainer = lightning.Trainer(
        accelerator=lightning_accelerator(), devices=2, strategy=strategy_of(arguments.strategy),
        max_steps=arguments.steps, logger=logger, log_every_n_steps=5, enable_checkpointing=False,
        enable_progress_bar=False, callbacks=[LedgerCallback()],
    )  # fmt: skip
    module = Classifier(fsdp2=arguments.strategy == "fsdp2")
    trainer.fit(module, DataLoader(TensorDataset(points, labels), batch_size=32))
    if trainer.is_global_zero:
        print(f"losses in {logger.log_dir}/metrics.csv")


if __name__ == "__main__":
    main()
