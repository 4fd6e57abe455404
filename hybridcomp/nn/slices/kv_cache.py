"""Keep the keys and values of a stage's earlier slices, and the gradients of these.

One buffer holds keys and values of the whole sequence, and every slice reads a prefix of it, so
only a slice's new keys and values are copied. The backward pass runs from the last slice to the
first, and every slice adds its gradients of all keys and values that it has read to one buffer for
the whole sequence. When the pass reaches a slice, that slice's part of the buffer is complete.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError


class _Kept:
    """Keys and values of one layer, and the sums of their gradients: (B, H, room, D) each."""

    def __init__(self) -> None:
        self._held: list[Tensor] = []
        self._grads: list[Tensor] | None = None

    def put(self, start: int, room: int, news: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Store keys and values of the tokens from ``start`` on; return those of all tokens so far.

        The result shares the buffer's memory but not autograd's version counter, since later
        writes only touch the buffer after the result's end.
        """
        stop = start + news[0].shape[2]
        if not self._held or self._held[0].shape[2] < stop:
            self._grow(start, max(stop, room), news)
        for held, values in zip(self._held, news, strict=True):
            held[:, :, start:stop] = values
        key, value = (held[:, :, :stop].data for held in self._held)
        return key, value

    def _grow(self, start: int, room: int, like: tuple[Tensor, Tensor]) -> None:
        """Allocate room for ``room`` tokens, or for twice as many as before."""
        before, self._held = self._held, []
        if before:
            room = max(room, 2 * before[0].shape[2])
        for number, values in enumerate(like):
            held = values.new_empty((*values.shape[:2], room, values.shape[3]))
            if before:
                held[:, :, :start] = before[number][:, :, :start]
            self._held.append(held)

    def add(self, start: int, grads: tuple[Tensor, ...]) -> list[Tensor]:
        """Add a slice's gradients of all tokens that it has read; return its own tokens' sums.

        Sums are in the dtype of the gradients, added from the latest slice to the first.
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
    """Append a slice's keys and values to earlier slices'; backward returns the full gradient."""

    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, kept: _Kept, start: int, room: int
    ) -> tuple[Tensor, Tensor]:
        ctx.kept, ctx.start = kept, start
        return kept.put(start, room, (key, value))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        key, value = ctx.kept.add(ctx.start, grads)
        return key, value, None, None, None


class KVCache:
    """Keys and values of a step's sequence, as one slice of a stage sees them.

    Each slice has its own ``KVCache`` on memory that all slices share. So a layer that is
    recomputed in the backward pass (activation checkpointing) still sees its own slice, even if
    later slices have run since.
    """

    def __init__(self, tokens: int = 0) -> None:
        """Begin a sequence with its first slice; ``tokens``: its length, 0 if unknown."""
        self._start, self._tokens = 0, tokens
        self._kept: dict[Hashable, _Kept] = {}
        self._lengths: dict[Hashable, int] = {}

    @property
    def start(self) -> int:
        """Return the number of tokens before the slice, which is its first position."""
        return self._start

    @property
    def room(self) -> int:
        """Return the number of tokens of the sequence, 0 if unknown."""
        return self._tokens

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Return the positions of the slice's tokens, (T,) int64."""
        return torch.arange(self._start, self._start + tokens, device=device)

    def attend(self, layer: Hashable, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Call ``extend``, and attend from the slice's queries to the result; (B, H, T, D).

        Arguments as for ``extend``, and the slice's queries (B, H, T, D), positions applied. A
        layer that uses ``attend`` and ``positions`` also works in ``hybridcomp.generate``.
        """
        return attend(query, *self.extend(layer, key, value))

    def at(self, start: int) -> KVCache:
        """Return the cache of the slice that begins with token ``start``, on the same memory."""
        later = KVCache(self._tokens)
        later._start, later._kept = start, self._kept
        return later

    def extend(self, layer: Hashable, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of all tokens to this slice's end, (B, H, start + T, D) each.

        Each attention layer calls it once per slice, under a unique name, and again only if it is
        recomputed in the backward pass. ``key`` and ``value`` are (B, H, T, D), positions applied;
        they are stored for the slices that follow.

        Raises ConfigError if a name occurs twice in a forward pass, or with a different T.
        """
        self._check(layer, key.shape[2])
        if self.start == 0 and key.shape[2] == self._tokens:
            return key, value  # no later slice needs them
        kept = self._kept.setdefault(layer, _Kept())
        if not torch.is_grad_enabled():
            return kept.put(self.start, self._tokens, (key, value))
        extended: tuple[Tensor, Tensor] = _Extend.apply(  # type: ignore[no-untyped-call]
            key, value, kept, self.start, self._tokens
        )
        return extended

    def _check(self, layer: Hashable, length: int) -> None:
        """Raise ConfigError if the keys would overwrite others stored for the same slice."""
        before = self._lengths.setdefault(layer, -1)
        self._lengths[layer] = length
        again = torch._C._current_graph_task_id() != -1  # a backward pass is running
        if before == -1 or (again and before == length):
            return
        name = type(layer).__name__ if isinstance(layer, torch.nn.Module) else layer
        given = f"keys of {length} tokens from layer {name}, which gave {before} of the same slice"
        todo = (
            "expected one call a slice; give each layer a name and each slice a KVCache of its own"
        )
        raise ConfigError("pp", Shown(given), f"{todo} (past.at(start))")


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend causally from a slice, (B, H, T, D), to all tokens up to its end, (B, H, S + T, D)."""
    length, whole = query.shape[2], key.shape[2]
    if length == whole:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)
    places = torch.arange(whole, device=query.device)
    mask = places <= places[whole - length :].unsqueeze(1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
