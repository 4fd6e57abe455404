"""Flatten all parameters of a model into one vector."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Flat:
    """Concatenated parameters, padded so that ``ranks`` get equal shards, multiples of 8 values.

    Vectors are fp32 for all parameter dtypes.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], ranks: int) -> None:
        self.parameters = list(parameters)
        used = sum(p.numel() for p in self.parameters)
        self.share = -(-used // (8 * ranks)) * 8
        self.count = self.share * ranks
        self._padding = self.count - used

    def weights(self) -> Tensor:
        """Return a copy of the parameters."""
        return self._join([p.detach() for p in self.parameters])

    def gradients(self) -> Tensor:
        """Return a copy of the gradients; zeros where there are none."""
        found = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters]
        return self._join(found)

    @torch.no_grad()
    def write(self, weights: Tensor) -> None:
        """Overwrite the parameters."""
        start = 0
        for parameter in self.parameters:
            piece = weights[start : start + parameter.numel()]
            parameter.copy_(piece.view_as(parameter))
            start += parameter.numel()

    def _join(self, tensors: list[Tensor]) -> Tensor:
        return F.pad(torch.cat([t.reshape(-1).float() for t in tensors]), (0, self._padding))
