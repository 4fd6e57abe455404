"""Choose linear layers and norms of the example's blocks by their sharding."""

from __future__ import annotations

from typing import Any

from torch import nn

from gpt.apex import fused_norm
from gpt.weights import Draw, ModelConfig


def megatron() -> Any:
    """Return the module of layers that megatron-core shards."""
    from gpt import tensor_parallel  # imports megatron-core, which few need

    return tensor_parallel


def mesh() -> Any:
    """Return the module of layers that hybridcomp shards over a mesh."""
    from gpt import two_dimensional  # imports hybridcomp, otherwise not needed

    return two_dimensional


def column(config: ModelConfig, inputs: int, outputs: int, draw: Draw, parts: int = 1) -> nn.Module:
    """Return a linear layer; --tp shards the outputs of each of its ``parts`` matrices."""
    if config.tp2d > 1:
        meshed: nn.Module = mesh().linear(inputs, outputs, draw, parts)
        return meshed
    if config.tp > 1:
        cut: nn.Module = megatron().Column(inputs, outputs, draw, parts)
        return cut
    layer = nn.Linear(inputs, outputs, bias=False)
    draw(layer.weight)
    return layer


def row(config: ModelConfig, inputs: int, outputs: int, draw: Draw) -> nn.Module:
    """Return a linear layer that adds to the residual stream; --tp shards its inputs."""
    if config.tp2d > 1:
        meshed: nn.Module = mesh().linear(inputs, outputs, draw.residual)
        return meshed
    if config.tp > 1:
        cut: nn.Module = megatron().Row(inputs, outputs, draw.residual)
        return cut
    layer = nn.Linear(inputs, outputs, bias=False)
    draw.residual(layer.weight)
    return layer


def make_norm(config: ModelConfig) -> nn.Module:
    """Return the norm of ``config``: NVIDIA apex's, if apex is installed and there is a GPU."""
    if config.tp2d > 1:
        cut: nn.Module = mesh().norm(config)
        return cut
    fused = fused_norm(config.norm)
    if fused is not None:
        return fused(config.width)
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.width, eps=1e-5)
    return nn.LayerNorm(config.width)
