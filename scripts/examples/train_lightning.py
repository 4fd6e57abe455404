#!/usr/bin/env python3
"""Lightning over DDP, with a callback that gives the ledger's figures to its logger.

HYBRIDCOMP_CONFIG=scripts/examples/ddp.json torchrun --nproc-per-node 2 -m hybridcomp.run \\
    scripts/examples/train_lightning.py
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hybridcomp


class Classifier(lightning.LightningModule):  # type: ignore[misc]  # not installed where it is checked
    """A small classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 16))

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        points, labels = batch
        loss = nn.functional.cross_entropy(self.layers(points), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Figures(lightning.Callback):  # type: ignore[misc]
    """Logs what hybridcomp has reported since the last step."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        attached = hybridcomp.attach(trainer.strategy.model)
        if attached is not None and trainer.logger is not None:
            trainer.logger.log_metrics(dict(attached.take_events()), step=attached.step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    lightning.seed_everything(0)
    points = torch.randn(arguments.steps * 64, 64)
    labels = (points @ torch.randn(64, 16)).argmax(1)
    trainer = lightning.Trainer(
        accelerator="auto", devices=int(torch.cuda.device_count() or 2), strategy="ddp",
        max_steps=arguments.steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, callbacks=[Figures()],
    )  # fmt: skip
    trainer.fit(Classifier(), DataLoader(TensorDataset(points, labels), batch_size=32))
    if trainer.is_global_zero:
        print(f"final loss {float(trainer.callback_metrics['loss']):.4f}")


if __name__ == "__main__":
    main()
