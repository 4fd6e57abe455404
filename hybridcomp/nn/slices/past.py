"""Past: keys and values of the slices before the one that a stage works on, with their gradients.

They lie in one piece of memory for the whole sequence, of which every slice sees a part, so that
nothing is copied for a later slice but its own keys and values. Slices run backward from the last
to the first. Until a slice's own turn comes, all that look at its keys and values have added their
gradients to one sum for the whole sequence, of which it takes its part.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class _Kept:
    """Keys and values of one layer, and the sums of their gradients: (B, H, room, D) each."""

    def __init__(self) -> None:
        self._held: list[Tensor] = []
        self._grads: list[Tensor] | None = None

    def put(self, start: int, room: int, news: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keep the keys and values of the tokens from ``start`` on; returns those of all so far.

        What is returned knows nothing of later writes into the same memory, which go behind it.
        """
        stop = start + news[0].shape[2]
        if not self._held or self._held[0].shape[2] < stop:
            self._grow(start, max(stop, room), news)
        for held, values in zip(self._held, news, strict=True):
            held[:, :, start:stop] = values
        key, value = (held[:, :, :stop].data for held in self._held)
        return key, value

    def _grow(self, start: int, room: int, like: tuple[Tensor, Tensor]) -> None:
        """Take memory for ``room`` tokens, or for twice as many as there was room for."""
        before, self._held = self._held, []
        if before:
            room = max(room, 2 * before[0].shape[2])
        for number, values in enumerate(like):
            held = values.new_empty((*values.shape[:2], room, values.shape[3]))
            if before:
                held[:, :, :start] = before[number][:, :, :start]
            self._held.append(held)

    def add(self, start: int, grads: tuple[Tensor, ...]) -> list[Tensor]:
        """Add gradients of all tokens up to a slice's end; returns those of the slice itself.

        Sums are in the dtype of the gradients, the latest slice first.
        """
        stop = grads[0].shape[2]
        if start == 0:
            sums = self._grads or [torch.zeros_like(grad) for grad in grads]
            return [g + total[:, :, :stop] for g, total in zip(grads, sums, strict=True)]
        if self._grads is None:
            room = self._held[0].shape[2]
            self._grads = [g.new_zeros((*g.shape[:2], room, g.shape[3])) for g in grads]
        for grad, total in zip(grads, self._grads, strict=True):
            total[:, :, :stop] += grad
        return [total[:, :, start:stop] for total in self._grads]


class _Extend(torch.autograd.Function):
    """A slice's keys and values behind those of before; in backward it gets all their gradients."""

    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, kept: _Kept, start: int, room: int
    ) -> tuple[Tensor, Tensor]:
        """Keep them, and give those of all tokens so far."""
        ctx.kept, ctx.start = kept, start
        return kept.put(start, room, (key, value))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """Add what the slice found to the sums, and take its own part of them."""
        key, value = ctx.kept.add(ctx.start, grads)
        return key, value, None, None, None


class Past:
    """What a stage remembers of a step's sequence.

    Attributes:
        start: tokens before the slice that the stage works on; its first position.
    """

    def __init__(self, tokens: int = 0) -> None:
        """``tokens``: of the whole sequence, as far as that is known."""
        self.start, self._tokens = 0, tokens
        self._kept: dict[Hashable, _Kept] = {}

    def extend(self, layer: Hashable, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens up to the end of this slice, (B, H, start + T, D) each.

        Called once a slice by each attention layer, under a name of its own; ``key`` and ``value``
        are (B, H, T, D), positions applied. They are kept for the slices that follow.
        """
        if self.start == 0 and key.shape[2] == self._tokens:
            return key, value  # nothing follows
        kept = self._kept.setdefault(layer, _Kept())
        if not torch.is_grad_enabled():
            return kept.put(self.start, self._tokens, (key, value))
        found: tuple[Tensor, Tensor] = _Extend.apply(  # type: ignore[no-untyped-call]
            key, value, kept, self.start, self._tokens
        )
        return found

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
