"""Attention over ranks in three ways, with the same blocks, through the channel ``cp``.

Shapes: H heads of queries, K of keys and values, S tokens of a rank, N ranks, D width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import Channels, native_nbytes
from hybridcomp.nn import ring_attention, shard
from hybridcomp.nn.context import blocks
from hybridcomp.nn.context.blocks import Mask
from hybridcomp.policy import Direction


@dataclass(frozen=True)
class Size:
    """Tokens of the whole sequence, heads of queries and of keys, width of a head."""

    length: int
    heads: int
    kept: int
    width: int

    @property
    def scale(self) -> float:
        """Of the scores."""
        return 1 / math.sqrt(self.width)


def draw(size: Size, dtype: torch.dtype) -> list[Tensor]:
    """Whole queries, keys, values and the gradient of the context, (1, heads, T, D)."""
    generator = torch.Generator().manual_seed(0)
    heads = (size.heads, size.kept, size.kept, size.heads)
    shapes = [(1, count, size.length, size.width) for count in heads]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


class Passes(Protocol):
    """Attention of this rank's part of a sequence in two passes."""

    def forward(self) -> None:
        """Compute the context."""

    def backward(self) -> list[Tensor]:
        """The context and the gradients of queries, keys and values."""


def prepare(method: str, tensors: Sequence[Tensor], size: Size, channels: Channels) -> Passes:
    """The two passes of ``method`` for whole ``tensors`` as ``draw`` gives them."""
    layout: Any = "contiguous" if method == "Ulysses" else "zigzag"
    held = [shard(values, dim=2, layout=layout) for values in tensors]
    if method == "ring":
        return RingPasses(held)
    wire = Wire(channels)
    return Gathered(held, size, wire) if method == "gather" else Ulysses(held, size, wire)


class RingPasses:
    """By ``hybridcomp.nn``."""

    def __init__(self, held: Sequence[Tensor]) -> None:
        self._held = held

    def forward(self) -> None:
        """As ``Passes`` says."""
        self._leaves = [values.detach().requires_grad_() for values in self._held[:3]]
        q, k, v = self._leaves
        self._out = ring_attention(q, k, v)

    def backward(self) -> list[Tensor]:
        """As ``Passes`` says."""
        self._out.backward(self._held[3])  # type: ignore[no-untyped-call]
        grads = (leaf.grad for leaf in self._leaves if leaf.grad is not None)
        return [self._out.detach(), *grads]


class Wire:
    """Collectives of the channel ``cp``, or native where its block says so."""

    def __init__(self, channels: Channels) -> None:
        self._channel = channels["cp"]
        self.ranks = dist.get_world_size()

    def exchange(self, parts: Tensor, direction: Direction) -> Tensor:
        """All-to-all of ``parts`` (N, ...): row r goes to rank r."""
        values, out = parts.contiguous().view(-1), torch.empty_like(parts.contiguous())
        raw = native_nbytes.all_to_all_nbytes(values.numel(), values.dtype, self.ranks)
        codec = self._channel.codec(values.numel(), values.dtype, None, direction)
        if codec is None:
            self._channel.native(raw, direction)
            dist.all_to_all_single(out.view(-1), values)
        else:
            self._channel.all_to_all(
                out.view(-1), values, codec, None, raw_nbytes=raw, direction=direction
            ).wait()
        return out

    def gather(self, own: Tensor) -> Tensor:
        """What all ranks hold, (N, ...)."""
        values = own.contiguous().view(-1)
        out = values.new_empty(self.ranks * values.numel())
        raw = native_nbytes.all_gather_nbytes(values.numel(), values.dtype, self.ranks)
        codec = self._channel.codec(values.numel(), values.dtype, None, "forward")
        if codec is None:
            self._channel.native(raw)
            dist.all_gather_into_tensor(out, values)
        else:
            self._channel.all_gather(values, out, codec, None, raw_nbytes=raw).wait()
        return out.view(self.ranks, *own.shape)

    def scatter(self, parts: Tensor) -> Tensor:
        """The sum over ranks of this rank's row of ``parts`` (N, ...)."""
        rows = [row.contiguous().view(-1) for row in parts]
        raw = native_nbytes.reduce_scatter_nbytes(parts.numel(), parts.dtype, self.ranks)
        codec = self._channel.codec(parts.numel(), parts.dtype, None, "backward")
        if codec is None:
            self._channel.native(raw, "backward")
            out = torch.empty_like(rows[0])
            dist.reduce_scatter(out, rows)
        else:
            handle = self._channel.reduce_scatter(
                rows, codec, None, raw_nbytes=raw, direction="backward"
            )
            out = handle.wait().to(parts.dtype)
        return out.view(parts.shape[1:])


class Ulysses:
    """Heads for sequence and back, as DeepSpeed Ulysses."""

    def __init__(self, held: Sequence[Tensor], size: Size, wire: Wire) -> None:
        self._held, self._size, self._wire = held, size, wire

    def forward(self) -> None:
        """As ``Passes`` says."""
        q, k, v = (self._to_heads(values, "forward") for values in self._held[:3])
        self._heads = q, k, v
        self._out, self._logs = blocks.forward(q, k, v, Mask(causal=True), self._size.scale)
        self._context = self._to_tokens(self._out.to(self._held[0].dtype), "forward")

    def backward(self) -> list[Tensor]:
        """As ``Passes`` says."""
        grad = self._to_heads(self._held[3], "backward")
        delta = (self._out * grad.float()).sum(-1)
        q, k, v = self._heads
        grads = blocks.backward(
            grad, q, k, v, delta, self._logs, Mask(causal=True), self._size.scale
        )
        wide = (values.to(self._held[0].dtype) for values in grads)
        return [self._context, *(self._to_tokens(values, "backward") for values in wide)]

    def _to_heads(self, values: Tensor, direction: Direction) -> Tensor:
        """(1, H, S, D) to (1, H / N, T, D)."""
        parts = values.view(1, self._wire.ranks, -1, *values.shape[2:]).movedim(1, 0)
        return self._wire.exchange(parts, direction).movedim(0, 2).flatten(2, 3)

    def _to_tokens(self, values: Tensor, direction: Direction) -> Tensor:
        """(1, H / N, T, D) to (1, H, S, D)."""
        parts = torch.stack(values.chunk(self._wire.ranks, 2))
        return self._wire.exchange(parts, direction).movedim(0, 1).flatten(1, 2)


class Gathered:
    """Keys and values of all ranks everywhere, their gradients by a reduce-scatter.

    Cut as for a ring, so that all ranks compute as much: chunk r and chunk 2 N - 1 - r.
    """

    def __init__(self, held: Sequence[Tensor], size: Size, wire: Wire) -> None:
        self._held, self._size, self._wire = held, size, wire
        self._half = held[0].shape[2] // 2
        rank, ranks = dist.get_rank(), wire.ranks
        self._chunks = (rank, 2 * ranks - 1 - rank)
        # of the chunks in order, where each lies in what is gathered
        self._order = [
            2 * c if c < ranks else 2 * (2 * ranks - 1 - c) + 1 for c in range(2 * ranks)
        ]

    def forward(self) -> None:
        """As ``Passes`` says."""
        self._k, self._v = (self._whole(self._wire.gather(t)) for t in self._held[1:3])
        q = self._held[0]
        self._out = torch.empty(q.shape, dtype=torch.float32)
        self._logs = torch.empty(q.shape[:3], dtype=torch.float32)
        for rows, keys, mask in self._blocks():
            found = blocks.forward(
                q[:, :, rows], self._k[:, :, keys], self._v[:, :, keys], mask, self._size.scale
            )
            out, logs = self._out[:, :, rows], self._logs[:, :, rows]
            if mask.causal:
                out.copy_(found[0])
                logs.copy_(found[1])
            else:
                blocks.merge(out, logs, *found)

    def backward(self) -> list[Tensor]:
        """As ``Passes`` says."""
        q, grad = self._held[0], self._held[3]
        delta = (self._out * grad.float()).sum(-1)
        grad_q = torch.zeros_like(self._out)
        sums = [torch.zeros(t.shape, dtype=torch.float32) for t in (self._k, self._v)]
        for rows, keys, mask in self._blocks():
            found = blocks.backward(
                grad[:, :, rows], q[:, :, rows], self._k[:, :, keys], self._v[:, :, keys],
                delta[:, :, rows], self._logs[:, :, rows], mask, self._size.scale,
            )  # fmt: skip
            grad_q[:, :, rows] += found[0]
            for total, values in zip(sums, found[1:], strict=True):
                total[:, :, keys] += values
        own = (self._wire.scatter(self._by_rank(total.to(q.dtype))) for total in sums)
        return [self._out.to(q.dtype), grad_q.to(q.dtype), *own]

    def _blocks(self) -> Iterator[tuple[slice, slice, Mask]]:
        """Rows of this rank, the keys that they see, and how: the causal one of rows first."""
        for place, chunk in enumerate(self._chunks):
            rows = slice(place * self._half, (place + 1) * self._half)
            start = chunk * self._half
            yield rows, slice(start, start + self._half), Mask(causal=True)
            if start:
                yield rows, slice(0, start), Mask(causal=False)

    def _whole(self, parts: Tensor) -> Tensor:
        """(N, 1, K, S, D) of all ranks as (1, K, T, D) in order."""
        chunks = [half for part in parts for half in part.chunk(2, 2)]
        return torch.cat([chunks[place] for place in self._order], 2)

    def _by_rank(self, whole: Tensor) -> Tensor:
        """(1, K, T, D) in order as (N, 1, K, S, D)."""
        chunks = whole.chunk(2 * self._wire.ranks, 2)
        by_place = dict(zip(self._order, chunks, strict=True))
        pairs = range(0, 2 * self._wire.ranks, 2)
        return torch.stack([torch.cat([by_place[n], by_place[n + 1]], 2) for n in pairs])


def sent(channels: Channels) -> int:
    """Bytes that this rank sent to others, as the ledger has them."""
    entries = channels.ledger.interval
    return int(entries["cp", "forward"].wire_nbytes + entries["cp", "backward"].wire_nbytes)


def distance(found: Sequence[Tensor], exact: Sequence[Tensor] | None) -> float | None:
    """The relative L2 error of context and gradients together; None: nothing to compare with."""
    if exact is None:
        return None
    wrong = sum(
        float((a.double() - b.double()).square().sum()) for a, b in zip(found, exact, strict=True)
    )
    return math.sqrt(wrong / sum(float(b.double().square().sum()) for b in exact))
