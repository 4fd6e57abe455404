#!/usr/bin/env python3
"""A loop over Accelerate, with one line about hybridcomp; DDP, or FSDP2 with --fsdp2 (GPUs).

accelerate launch --num_processes 2 scripts/examples/train_accelerate.py \\
    --block scripts/examples/ddp.json
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hybridcomp


def model_of(width: int = 256) -> nn.Module:
    """A small classifier."""
    return nn.Sequential(
        nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 16)
    )


def data_of(count: int) -> TensorDataset:
    """Points and the directions that they are nearest to, in the place of a dataset."""
    generator = torch.Generator().manual_seed(0)
    points, directions = torch.randn(count, 64, generator=generator), torch.randn(64, 16)
    return TensorDataset(points, (points @ directions).argmax(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block", help='a block, or a file with one under "compression"')
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--fsdp2", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if arguments.fsdp2 else None
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=not torch.cuda.is_available())
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data_of(arguments.steps * 64), batch_size=32)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    attached = hybridcomp.attach(model, arguments.block)
    for points, labels in loader:
        loss = nn.functional.cross_entropy(model(points), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if attached is not None:
            accelerator.log(dict(attached.take_events()), step=attached.step)
    accelerator.print(f"final loss {float(loss.detach()):.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
