"""A tiny transformer, plain and on a mesh, for tests of sharded layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from hybridcomp.channels import Channels
from hybridcomp.config import CompressionConfig
from hybridcomp.nn import tp2d

BATCH, LENGTH, WIDTH, HEADS, WORDS = 4, 6, 32, 4, 50
#: a mesh of 3 x 3 divides width, heads and samples; the vocabulary is padded
OF_NINE = 36, 3, 3


class Plain(nn.Module):
    """Embedding, a block of attention and one of MLP, output."""

    def __init__(self, tied: bool = False, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.table = nn.Embedding(WORDS, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width, eps=1e-5)
        self.qkv, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.out = None if tied else nn.Linear(width, WORDS, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 1:
                nn.init.uniform_(parameter, 0.5, 1.5)
        nn.init.normal_(self.table.weight, std=0.1)  # gives tied logits a realistic spread

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens)
        hidden = hidden + self.mixed(self._attend(self.qkv(self.norm1(hidden))))
        hidden = hidden + self.down(F.gelu(self.up(self.norm2(hidden))))
        return self.logits(hidden)

    def _attend(self, qkv: Tensor) -> Tensor:
        batch, length, _ = qkv.shape
        cut = qkv.view(batch, length, 3, self.heads, -1)
        query, key, value = cut.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.table.weight) if self.out is None else self.out(hidden)

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self(tokens).flatten(0, 1), labels.flatten())


class Meshed(Plain):
    """The same on a mesh, sharded from a plain model."""

    def __init__(self, mesh: tp2d.Mesh, whole: Plain) -> None:
        nn.Module.__init__(self)
        self.mesh, self.heads = mesh, whole.heads // mesh.q
        self.table = tp2d.Embedding(mesh, whole.table)  # type: ignore[assignment]
        self.norm1 = tp2d.LayerNorm(mesh, whole.norm1)  # type: ignore[assignment]
        self.norm2 = tp2d.RMSNorm(mesh, whole.norm2)  # type: ignore[assignment]
        self.qkv = tp2d.Linear(mesh, whole.qkv, parts=3)  # type: ignore[assignment]
        for name in ("mixed", "up", "down"):
            setattr(self, name, tp2d.Linear(mesh, getattr(whole, name)))
        self.out = None
        if whole.out is not None:
            self.out = tp2d.Linear(mesh, whole.out, vocabulary=WORDS)  # type: ignore[assignment]

    def logits(self, hidden: Tensor) -> Tensor:
        if self.out is None:
            return tp2d.project(self.table, hidden)  # type: ignore[arg-type]
        logits: Tensor = self.out(hidden)
        return logits

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return tp2d.cross_entropy(self(tokens), self.mesh.part(labels), self.mesh, WORDS)


def batch(q: int = 2) -> tuple[Tensor, Tensor]:
    """Return tokens and labels, one of which is ignored."""
    generator = torch.Generator().manual_seed(7)
    samples = OF_NINE[2] if q == 3 else BATCH
    tokens = torch.randint(WORDS, (samples, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, 0] = -100
    return tokens[:, :-1], labels


def channels_of(block: Mapping[str, Any] | None) -> Channels | None:
    """Return a block's channels, without an engine."""
    return None if block is None else Channels(CompressionConfig.parse(dict(block)))


def pair(
    q: int, dtype: torch.dtype, block: Mapping[str, Any] | None, tied: bool = False
) -> tuple[Plain, Meshed]:
    """Return the plain model and its mesh version, whose channels are those of ``block``."""
    torch.manual_seed(3)
    width, heads = OF_NINE[:2] if q == 3 else (WIDTH, HEADS)
    plain = Plain(tied, width, heads).to(dtype)
    channels = channels_of(block)
    return plain, Meshed(tp2d.Mesh(q, lambda: channels), plain)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return gradients by parameter name."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def joined(model: nn.Module, own: Mapping[str, Tensor], q: int = 2) -> dict[str, Tensor]:
    """Gather the parts ``own`` of this rank from all ranks; return whole tensors by parameter."""
    states: list[Any] = [None] * (q * q)
    dist.all_gather_object(states, own)
    return tp2d.join_states(states, tp2d.layouts_of(model), q)
