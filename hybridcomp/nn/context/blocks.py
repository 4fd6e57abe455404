"""Compute attention of one block (some queries, some keys) in plain torch, tile by tile.

Shapes: B samples, H heads of queries, K heads of keys and values (K divides H), S queries, T keys,
D width of a head. Scores and sums are fp32, or fp64 for fp64 inputs. A block returns each row's
log-sum-exp of the scores, with which blocks can be merged in any order (``merge``),
as in FlashAttention (arXiv 2205.14135) and ring attention (arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

#: most score elements at a time: 1 Mi fp32 values fit in a core's cache for a while
TILE = 1 << 20
#: a causal block is cut into at least this many tiles, of at least this many rows: a tile computes
#: all keys that its last row sees, so one tile for all rows would compute twice the needed scores
CAUSAL_TILES, CAUSAL_ROWS = 8, 64


@dataclass(frozen=True)
class Mask:
    """Attention mask of a block: the keys that each row sees.

    Attributes:
        causal: row i sees keys 0 to i; the block then has as many rows as keys.
        rows, keys: document numbers (B, S) and (B, T), None: one document. A row sees the keys with
            its number; -1 is padding, which sees nothing and is not seen.
    """

    causal: bool
    rows: Tensor | None = None
    keys: Tensor | None = None

    def hide(self, scores: Tensor, start: int, stop: int) -> Tensor:
        """Mask ``scores`` (B, K, G, s, t) of rows ``start`` to ``stop`` with -inf, in place."""
        count = scores.shape[-1]
        if self.causal:
            seen = torch.ones(stop - start, count - start, dtype=torch.bool, device=scores.device)
            scores[..., start:].masked_fill_(seen.tril_().logical_not_(), -torch.inf)
        if self.rows is not None and self.keys is not None:
            rows, keys = self.rows[:, start:stop, None], self.keys[:, None, :count]
            hidden = (rows != keys) | (rows < 0)
            scores.masked_fill_(hidden[:, None, None], -torch.inf)
        return scores


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which scores and sums of inputs of ``dtype`` are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
    """Return a block's context (B, H, S, D) and row logarithms (B, H, S), in ``accumulator`` dtype.

    A row that sees nothing has the context 0 and the logarithm -inf.
    """
    wide = accumulator(q.dtype)
    batch, heads, length, _ = q.shape
    out = torch.empty(batch, heads, length, v.shape[-1], dtype=wide, device=q.device)
    logs = torch.empty(batch, heads, length, dtype=wide, device=q.device)
    keys, values = k.to(wide).transpose(-1, -2), v.to(wide)
    for start, stop, count in _tiles(q, k, mask):
        scores = _scores(q[:, :, start:stop], keys[..., :count], scale)
        scores = mask.hide(scores, start, stop)
        top = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(wide).min)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        context = _by_group(weights, values[..., :count, :])
        context.div_(total.clamp(min=torch.finfo(wide).tiny))
        out[:, :, start:stop] = context.flatten(1, 2)
        logs[:, :, start:stop] = (total.log() + top).squeeze(-1).flatten(1, 2)
    return out, logs


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    delta: Tensor,
    logs: Tensor,
    mask: Mask,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a block's queries, keys and values, as ``accumulator`` dtype.

    Args:
        grad: gradient of the context over all keys, (B, H, S, D).
        q, k, v: as in ``forward``.
        delta: sums over D of the context times its gradient, (B, H, S), as ``accumulator`` dtype.
        logs: each row's log-sum-exp over all keys, not only those of this block, (B, H, S).
        mask, scale: as in ``forward``.
    """
    wide = accumulator(q.dtype)
    keys, values = k.to(wide), v.to(wide)
    grad_q = torch.empty(q.shape, dtype=wide, device=q.device)
    grad_k, grad_v = torch.zeros_like(keys), torch.zeros_like(values)
    logs = logs.masked_fill(logs == -torch.inf, 0.0)  # rows that see nothing: their weights are 0
    for start, stop, count in _tiles(q, k, mask):
        rows, heads = slice(start, stop), k.shape[1]
        queries, grads = (_grouped(t[:, :, rows].to(wide), heads) for t in (q, grad))
        scores = _scores(q[:, :, rows], keys[..., :count, :].transpose(-1, -2), scale)
        scores = mask.hide(scores, start, stop)
        weights = scores.sub_(_grouped(logs[:, :, rows, None], heads)).exp_()
        grad_v[..., :count, :] += _over_rows(weights, grads)
        slopes = _by_group(grads, values[..., :count, :].transpose(-1, -2))
        slopes.sub_(_grouped(delta[:, :, rows, None], heads)).mul_(weights).mul_(scale)
        grad_q[:, :, rows] = _by_group(slopes, keys[..., :count, :]).flatten(1, 2)
        grad_k[..., :count, :] += _over_rows(slopes, queries)
    return grad_q, grad_k, grad_v


def merge(out: Tensor, logs: Tensor, context: Tensor, more: Tensor) -> None:
    """Merge a block's ``context`` and logarithms ``more`` into ``out`` and ``logs``, in place."""
    total = torch.logaddexp(logs, more)
    least = torch.finfo(total.dtype).min
    shift = total.clamp(min=least)  # rows that see nothing in either: both factors are 0
    out.mul_((logs - shift).exp_().unsqueeze(-1))
    out.addcmul_(context.to(out.dtype), (more - shift).exp_().unsqueeze(-1))
    logs.copy_(total)


def _tiles(q: Tensor, k: Tensor, mask: Mask) -> Iterator[tuple[int, int, int]]:
    """Yield the first row, end row and number of visible keys of each tile."""
    length, count = q.shape[2], k.shape[2]
    rows = max(1, TILE // max(1, q.shape[0] * q.shape[1] * count))
    if mask.causal:
        rows = min(rows, max(CAUSAL_ROWS, -(-length // CAUSAL_TILES)))
    for start in range(0, length, rows):
        stop = min(start + rows, length)
        yield start, stop, stop if mask.causal else count


def _grouped(values: Tensor, heads: int) -> Tensor:
    """View (B, H, S, D) as (B, K, H / K, S, D)."""
    return values.view(values.shape[0], heads, -1, *values.shape[2:])


def _scores(q: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Return the scaled scores (B, K, G, s, T) of queries (B, H, s, D) and keys (B, K, D, T)."""
    return _by_group(_grouped(q.to(keys.dtype), keys.shape[1]) * scale, keys)


def _by_group(left: Tensor, right: Tensor) -> Tensor:
    """Multiply (B, K, G, s, x) by (B, K, x, y): the G query heads of a group share their keys."""
    products = left.flatten(2, 3) @ right
    return products.view(*products.shape[:2], *left.shape[2:4], products.shape[-1])


def _over_rows(left: Tensor, right: Tensor) -> Tensor:
    """Multiply (B, K, G, s, x) by (B, K, G, s, y) to (B, K, x, y), summing over G and s."""
    return left.flatten(2, 3).transpose(-1, -2) @ right.flatten(2, 3)
