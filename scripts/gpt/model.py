"""A small GPT: rotary positions, pre-normalization, causal attention, GELU.

One list of layers makes both forms, a plain module and a ``PipelineModule``. Every layer draws its
weights from a generator of its own, seeded with the run's seed and the layer's number: both forms,
and every way to cut the pipeline, begin with the same weights.

Shapes: B samples, T tokens, C width, H heads, D = C / H, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt.apex import fused_norm

Norm = Literal["rmsnorm", "layernorm"]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes. Raises ValueError where they do not fit together."""

    vocabulary: int
    layers: int = 4
    width: int = 128
    heads: int = 4
    norm: Norm = "rmsnorm"
    tied: bool = False  # one weight for embedding and output
    seed: int = 0

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width {self.width}, heads {self.heads}: expected a width that is a multiple of "
                f"twice the heads, for rotary pairs; try width {2 * self.heads * 16}"
            )
        for name in ("vocabulary", "layers", "width", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, found {getattr(self, name)}")


@functools.lru_cache(maxsize=8)
def rotary_table(length: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions and frequencies, fp32, (T, D/2) each (arXiv 2104.09864).

    No buffers: DeepSpeed would turn those into bf16, in which position 257 equals 256.
    """
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return angles.cos().float().to(device), angles.sin().float().to(device)


def rotate(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + D/2) of ``values`` (..., T, D) by the angles of their position."""
    first, second = values.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(values.dtype)


class Embedding(nn.Module):
    """Tokens (B, T) to hidden states (B, T, C)."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocabulary, config.width))
        initialize(self, config, number)

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up."""
        return F.embedding(tokens, self.weight)


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and beside a residual connection."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        self.heads = config.heads
        width = config.width
        self.norm1 = make_norm(config)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.norm2 = make_norm(config)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        initialize(self, config, number)

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        hidden = hidden + self._attend(self.norm1(hidden))
        out: Tensor = hidden + self.down(F.gelu(self.up(self.norm2(hidden))))
        return out

    def _attend(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        qkv = self.qkv(hidden).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        cos, sin = rotary_table(length, width // self.heads, hidden.device)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class FinalNorm(nn.Module):
    """The norm before the output."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        self.norm = make_norm(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        out: Tensor = self.norm(hidden)
        return out


class Output(nn.Module):
    """Hidden states (B, T, C) to logits (B, T, V)."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocabulary, config.width))
        initialize(self, config, number)

    def forward(self, hidden: Tensor) -> Tensor:
        """Project."""
        return project(self, hidden)


def project(layer: nn.Module, hidden: Tensor) -> Tensor:
    """Logits (B, T, V) with the weight of ``layer``, which may be the embedding."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return F.linear(hidden, weight)


def lm_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats, fp32, of logits (B, T, V) and labels (B, T)."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class GPT(nn.Module):
    """The plain form: tokens (B, T) to logits (B, T, V)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        kinds = _kinds(config)
        self.layers = nn.ModuleList(kind(config, n) for n, kind in enumerate(kinds))
        if config.tied:
            self.layers[-1].weight = self.layers[0].weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Through all layers."""
        hidden = tokens
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def pipeline(config: ModelConfig, stages: int) -> Any:
    """The same layers as a ``PipelineModule`` of ``stages`` stages with ``lm_loss``."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    specs = [LayerSpec(kind, config, n) for n, kind in enumerate(_kinds(config))]
    if config.tied:
        specs[0] = TiedLayerSpec("embedding", Embedding, config, 0, tied_weight_attr="weight")
        specs[-1] = TiedLayerSpec(
            "embedding", Embedding, config, 0, forward_fn=project, tied_weight_attr="weight"
        )
    return PipelineModule(specs, num_stages=stages, loss_fn=lm_loss, partition_method="parameters")


def _kinds(config: ModelConfig) -> list[type[nn.Module]]:
    return [Embedding, *[Block] * config.layers, FinalNorm, Output]


def make_norm(config: ModelConfig) -> nn.Module:
    """The norm of ``config``, NVIDIA apex's where it is installed and there is a GPU."""
    fused = fused_norm(config.norm)
    if fused is not None:
        return fused(config.width)
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.width, eps=1e-5)
    return nn.LayerNorm(config.width)


def initialize(layer: nn.Module, config: ModelConfig, number: int) -> None:
    """Normal weights of deviation 0.02, smaller for what is added to the residual stream."""
    generator = torch.Generator().manual_seed(1_000_003 * config.seed + number)
    for name, parameter in layer.named_parameters():
        if parameter.dim() < 2:
            continue  # norms begin at one and zero
        residual = name.startswith(("attention_out", "down"))
        deviation = 0.02 / math.sqrt(2 * config.layers) if residual else 0.02
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)
