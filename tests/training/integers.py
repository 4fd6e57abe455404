"""A model whose gradients are small integers, so that sums are exact in any order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

MOST = 61 * 53

#: by name, the parts that each micro-batch of a step uses; their counts divide exactly
USED = {
    "all": ["abcde"] * 8,
    "some not in the last": ["abcde", "abcd", "ce", "ab"],
    "one in the last": ["abcde", "abcde", "abcde", "d"],
    "some in the last alone": ["ab", "abcde"],
}


class Part(nn.Module):
    """Parameters that a micro-batch may use."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.values = nn.ParameterList(torch.ones(shape) for shape in shapes)

    def forward(self, factors: Tensor) -> Tensor:
        rows = [
            (values * factors[: values.numel()].view(values.shape).to(values)).sum()
            for values in self.values
        ]
        return torch.stack(rows).sum()


class Integers(nn.Module):
    """Parts of odd sizes, one larger than a bucket of ``trainer``, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {
                "a": Part((53, 24), (53,)),
                "b": Part((7, 31)),
                "c": Part((61, 53)),
                "d": Part((1,)),
                "e": Part((31, 7), (5,), (3,)),
                "frozen": Part((9,)).requires_grad_(False),
            }
        )

    def forward(self, used: str, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        total: Any = 0
        for name in [*used, "frozen"]:
            factors = torch.randint(-4, 5, (MOST,), generator=generator).float()
            total = total + self.parts[name](factors)
        summed: Tensor = total
        return summed
