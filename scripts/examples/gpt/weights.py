"""Size of the example model, and initialization of its weights independent of their sharding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Norm = Literal["rmsnorm", "layernorm"]


@dataclass(frozen=True)
class ModelConfig:
    """Model size. Raises ValueError for inconsistent sizes."""

    vocabulary: int
    layers: int = 4
    width: int = 128
    heads: int = 4
    norm: Norm = "rmsnorm"
    tied: bool = False  # one weight for embedding and output
    seed: int = 0
    tp: int = 1  # ranks over which megatron-core shards the layers
    tp2d: int = 1  # side of the mesh over which hybridcomp shards the layers
    cp: int = 1  # ranks over which hybridcomp's ring attention shards sequences
    #: (first, stop) blocks, from 0, of each segment that backward recomputes from its input
    recompute: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.heads % (self.tp * self.tp2d):
            raise ValueError(
                f"heads {self.heads}: expected a multiple of the {self.tp * self.tp2d} "
                "tensor-parallel ranks that share them"
            )
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width {self.width}, heads {self.heads}: expected a width that is a multiple of "
                f"twice the heads, for rotary pairs; try width {2 * self.heads * 16}"
            )
        for name in ("vocabulary", "layers", "width", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, found {getattr(self, name)}")


class Draw:
    """Draws the weights of a layer in order: normal, standard deviation 0.02."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        self._generator = torch.Generator().manual_seed(1_000_003 * config.seed + number)
        self._layers = config.layers

    def __call__(self, weight: Tensor) -> None:
        """Initialize a whole weight in place."""
        self._fill(weight, 0.02)

    def residual(self, weight: Tensor) -> None:
        """Initialize a weight that feeds the residual stream, with a smaller deviation."""
        self._fill(weight, 0.02 / math.sqrt(2 * self._layers))

    def _fill(self, weight: Tensor, deviation: float) -> None:
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=self._generator) * deviation)
