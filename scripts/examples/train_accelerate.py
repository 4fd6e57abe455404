#!/usr/bin/env python3
"""A training loop with Accelerate, under DDP, FSDP2 or DeepSpeed.

accelerate launch --multi_gpu --num_processes 2 scripts/examples/train_accelerate.py \\
    --block scripts/examples/ddp.json
accelerate launch --config_file scripts/examples/accelerate_fsdp2.yaml \\
    scripts/examples/train_accelerate.py --block scripts/examples/fsdp2.json
DS_ACCELERATOR=cpu accelerate launch --config_file scripts/examples/accelerate_deepspeed.yaml \\
    -m hybridcomp.run scripts/examples/train_accelerate.py
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from on_cpu import accelerate_on_cpu
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hybridcomp
from hybridcomp.patches.trainers.figures import take


class Block(nn.Module):
    """A layer that FSDP2 shards separately."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)

    def forward(self, values: Tensor) -> Tensor:
        """Map (samples, inputs) to (samples, outputs)."""
        return nn.functional.gelu(self.layer(values))


def data_of(count: int) -> TensorDataset:
    """Return points and their nearest directions, in place of a dataset."""
    points, directions = torch.randn(count, 64), torch.randn(64, 16)
    return TensorDataset(points, (points @ directions).argmax(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block", help='a block, or a file with one under "compression"')
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--log-with", help="tensorboard, wandb, ...")
    parser.add_argument("--output", default="runs/accelerate")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    accelerate_on_cpu()
    accelerator = Accelerator(log_with=arguments.log_with, project_dir=arguments.output)
    model = nn.Sequential(Block(64, 256), Block(256, 256), nn.Linear(256, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data_of(arguments.steps * 64), batch_size=32)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if arguments.block:
        hybridcomp.attach(model, arguments.block)
    accelerator.init_trackers("hybridcomp")
    losses: list[float] = []
    for step, (points, labels) in enumerate(loader, 1):
        loss = nn.functional.cross_entropy(model(points), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        accelerator.log({"loss": loss.item(), **take(model)}, step=step)
    accelerator.print(f"losses {losses[0]:.4f} to {losses[-1]:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
