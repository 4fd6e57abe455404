"""A two-stage model for tests of slices: attention, dropout, and a call-counting buffer."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from hybridcomp.channels import Channels
from hybridcomp.nn.slices import KVCache, SlicedStage, attend

WIDTH, HEADS, LENGTH, GRANULE, STAGES = 8, 2, 64, 4, 2


class Layers(nn.Module):
    """A stage with dropout, which draws random numbers, and a call-counting buffer."""

    calls: Tensor

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH) if first else None
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, values: Tensor, past: KVCache) -> Tensor:
        self.calls += 1
        if self.table is not None:
            values = self.table(values)
        cut = self.qkv(values).view(*values.shape[:2], 3, HEADS, -1)
        query, key, value = cut.permute(2, 0, 3, 1, 4)
        mixed = attend(query, *past.extend(self, key, value))
        return F.dropout(values + mixed.transpose(1, 2).flatten(2), 0.1)


def loss_of(hidden: Tensor, labels: Tensor) -> Tensor:
    return (hidden[..., 0] - labels).square().mean()


def stage(channels: Channels | None = None) -> SlicedStage:
    torch.manual_seed(3)
    layers = Layers(dist.get_rank() == 0)
    return SlicedStage(layers, (LENGTH,), WIDTH, loss_of, channels=lambda: channels)
