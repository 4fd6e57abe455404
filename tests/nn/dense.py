"""Attention of whole sequences and its gradients, which every rank can compute alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridcomp.nn.context.layout import Layout


@dataclass(frozen=True)
class Case:
    """Shapes: B samples, H query heads, K key heads, T tokens in all, widths D and E.

    ``documents``: lengths of each sequence's documents; the rest is padding.
    """

    batch: int = 2
    heads: int = 4
    kept: int = 2
    length: int = 48
    width: int = 20
    value_width: int | None = None
    causal: bool = True
    layout: Layout = "zigzag"
    dtype: torch.dtype = torch.float32
    documents: tuple[tuple[int, ...], ...] | None = None

    def numbers(self) -> Tensor | None:
        """Return document numbers, (B or 1, T)."""
        if self.documents is None:
            return None
        rows = []
        for lengths in self.documents:
            row = torch.full((self.length,), -1, dtype=torch.int32)
            start = 0
            for number, length in enumerate(lengths):
                row[start : start + length] = number
                start += length
            rows.append(row)
        return torch.stack(rows)


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return whole queries, keys, values and the context's gradient."""
    generator = torch.Generator().manual_seed(7)
    value_width = case.value_width or case.width

    def draw(heads: int, width: int) -> Tensor:
        shape = (case.batch, heads, case.length, width)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)

    return (
        draw(case.heads, case.width), draw(case.kept, case.width),
        draw(case.kept, value_width), draw(case.heads, value_width),
    )  # fmt: skip


def attention(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention by a softmax over all scores at once."""
    times = case.heads // case.kept
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    scores = (q @ k.transpose(-1, -2)) * case.width**-0.5
    seen = torch.ones(case.length, case.length, dtype=torch.bool)
    if case.causal:
        seen = seen.tril()
    numbers = case.numbers()
    if numbers is not None:
        same = (numbers[:, :, None] == numbers[:, None, :]) & (numbers[:, :, None] >= 0)
        seen = (seen & same)[:, None]
    weights: Tensor = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.matmul(weights, v)


def whole(case: Case) -> list[Tensor]:
    """Return context and gradients of queries, keys and values, of the dense model in fp64."""
    q, k, v, grad = (values.double() for values in inputs(case))
    leaves = [values.requires_grad_() for values in (q, k, v)]
    out = attention(case, *leaves)
    out.backward(grad)  # type: ignore[no-untyped-call]
    gradients = [leaf.grad for leaf in leaves]
    assert all(gradient is not None for gradient in gradients)
    return [out.detach(), *(g for g in gradients if g is not None)]
