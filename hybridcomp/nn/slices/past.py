"""Past: keys and values of the slices before the one that a stage works on, with their gradients.

Slices run backward from the last to the first. Until a slice's own turn comes, all that look at its
keys and values have left their gradients there, and it adds them to its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class _Keep(torch.autograd.Function):
    """Keys and values as they are; what later slices add to their gradients joins in backward."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, kept: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Leaves for later slices go into ``kept``."""
        ctx.kept = kept
        kept += [key.detach().requires_grad_(), value.detach().requires_grad_()]
        return key.view_as(key), value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Sums in the dtype of the gradients."""
        found = [
            grad if leaf.grad is None else grad + leaf.grad
            for grad, leaf in zip(grads, ctx.kept, strict=True)
        ]
        return found[0], found[1], None


class Past:
    """What a stage remembers of a step's sequence.

    Attributes:
        start: tokens before the slice that the stage works on; its first position.
    """

    def __init__(self) -> None:
        self.start = 0
        self._kept: defaultdict[Hashable, list[list[Tensor]]] = defaultdict(list)

    def extend(self, layer: Hashable, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens up to the end of this slice, (B, H, start + T, D) each.

        Called once a slice by each attention layer, under a name of its own; ``key`` and ``value``
        are (B, H, T, D), positions applied. They are kept for the slices that follow.
        """
        earlier = list(self._kept[layer])
        if not torch.is_grad_enabled():
            self._kept[layer].append([key, value])
        else:
            kept: list[Tensor] = []
            key, value = _Keep.apply(key, value, kept)  # type: ignore[no-untyped-call]
            self._kept[layer].append(kept)
        if not earlier:
            return key, value
        keys, values = zip(*earlier, strict=True)
        return torch.cat([*keys, key], dim=2), torch.cat([*values, value], dim=2)

    def advance(self, tokens: int) -> None:
        """This slice, of so many tokens, is through."""
        self.start += tokens


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of a slice, (B, H, T, D), to all tokens up to its end, (B, H, S + T, D)."""
    length, whole = query.shape[2], key.shape[2]
    if length == whole:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)
    places = torch.arange(whole, device=query.device)
    mask = places <= places[whole - length :].unsqueeze(1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
