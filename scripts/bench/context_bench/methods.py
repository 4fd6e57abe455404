"""Attention over ranks in three ways, with the same blocks, through the channel ``cp``.

Shapes: H heads of queries, K of keys and values, S tokens of a rank, N ranks, D width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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


def prepare(
    method: str, tensors: Sequence[Tensor], size: Size, channels: Channels
) -> Callable[[], list[Tensor]]:
    """One pass forward and backward of this rank's part: its context and three gradients."""
    layout: Any = "zigzag" if method == "ring" else "contiguous"
    held = [shard(values, dim=2, layout=layout) for values in tensors]
    if method == "ring":
        return lambda: ring(held)
    wire = Wire(channels)
    if method == "gather":
        return lambda: gathered(held, size, wire)
    return lambda: ulysses(held, size, wire)


def ring(held: Sequence[Tensor]) -> list[Tensor]:
    """By ``hybridcomp.nn``."""
    q, k, v = (values.detach().requires_grad_() for values in held[:3])
    out = ring_attention(q, k, v)
    out.backward(held[3])  # type: ignore[no-untyped-call]
    return [out.detach(), *(leaf.grad for leaf in (q, k, v) if leaf.grad is not None)]


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


def ulysses(held: Sequence[Tensor], size: Size, wire: Wire) -> list[Tensor]:
    """Heads for sequence and back, as DeepSpeed Ulysses."""
    ranks = wire.ranks

    def to_heads(values: Tensor, direction: Direction) -> Tensor:
        """(1, H, S, D) to (1, H / N, T, D)."""
        parts = values.view(1, ranks, -1, *values.shape[2:]).movedim(1, 0)
        return wire.exchange(parts, direction).movedim(0, 2).flatten(2, 3)

    def to_tokens(values: Tensor, direction: Direction) -> Tensor:
        """(1, H / N, T, D) to (1, H, S, D)."""
        parts = torch.stack(values.chunk(ranks, 2))
        return wire.exchange(parts, direction).movedim(0, 1).flatten(1, 2)

    q, k, v = (to_heads(values, "forward") for values in held[:3])
    mask = Mask(causal=True)
    out, logs = blocks.forward(q, k, v, mask, size.scale)
    context = to_tokens(out.to(q.dtype), "forward")
    grad = to_heads(held[3], "backward")
    delta = (out * grad.float()).sum(-1)
    grads = blocks.backward(grad, q, k, v, delta, logs, mask, size.scale)
    return [context, *(to_tokens(values.to(q.dtype), "backward") for values in grads)]


def gathered(held: Sequence[Tensor], size: Size, wire: Wire) -> list[Tensor]:
    """Keys and values of all ranks everywhere, their gradients by a reduce-scatter."""
    q, grad = held[0], held[3]
    length, rank = q.shape[2], dist.get_rank()
    # the causal mask of later rows, as one of documents would have it: what is hidden is cut off
    k, v = (wire.gather(values).movedim(0, 2).flatten(2, 3) for values in held[1:3])
    start, stop = rank * length, (rank + 1) * length
    whole = Mask(causal=False)
    parts = [(k[:, :, start:stop], v[:, :, start:stop], Mask(causal=True), slice(start, stop))]
    if rank:
        parts.append((k[:, :, :start], v[:, :, :start], whole, slice(0, start)))
    out, logs = blocks.forward(q, *parts[0][:2], parts[0][2], size.scale)
    for ks, vs, mask, _ in parts[1:]:
        blocks.merge(out, logs, *blocks.forward(q, ks, vs, mask, size.scale))
    delta = (out * grad.float()).sum(-1)
    grad_q = torch.zeros_like(out)
    sums = [torch.zeros_like(k), torch.zeros_like(v)]
    for ks, vs, mask, place in parts:
        found = blocks.backward(grad, q, ks, vs, delta, logs, mask, size.scale)
        grad_q += found[0]
        for total, values in zip(sums, found[1:], strict=True):
            total[:, :, place] = values.to(total.dtype)
    rows = [torch.stack(total.chunk(wire.ranks, 2)) for total in sums]
    return [out.to(q.dtype), grad_q.to(q.dtype), *(wire.scatter(row) for row in rows)]


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
