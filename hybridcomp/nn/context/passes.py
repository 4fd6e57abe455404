"""Compute ring attention block by block in a forward and a backward pass.

Shapes: B samples, H heads of queries, K heads of keys and values, S tokens of this rank, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridcomp.collectives.ring import Contents, PackedMessage, Ring
from hybridcomp.nn.context import kernels
from hybridcomp.nn.context.blocks import Mask, accumulator, merge
from hybridcomp.nn.context.layout import BlockPart, Layout, part
from hybridcomp.nn.context.traffic import Gradients, RingKV, RingTraffic


@dataclass(frozen=True)
class RingCall:
    """Arguments of one call's forward and backward pass; ``documents``: (B or 1, S) per rank."""

    traffic: RingTraffic
    causal: bool
    scale: float
    layout: Layout
    documents: Sequence[Tensor] | None

    def part(self, rank: int, owner: int, length: int) -> BlockPart | None:
        """Select the block that ``rank`` computes with ``owner``'s keys; None: masked out."""
        ranks = self.traffic.ranks
        return part(rank, owner, length, ranks=ranks, causal=self.causal, layout=self.layout)

    def mask(self, what: BlockPart, owner: int) -> Mask:
        """Return the mask of block ``what``: this rank's queries against ``owner``'s keys."""
        if self.documents is None:
            return Mask(what.causal)
        rows = self.documents[self.traffic.rank][:, what.queries]
        return Mask(what.causal, rows, self.documents[owner][:, what.keys])

    @property
    def halves(self) -> int:
        """Return the number of chunks of encoded keys: 2 if some ranks decode only half."""
        split = self.causal and self.layout == "zigzag" and self.traffic.ranks > 1
        return 2 if split else 1


class RingFunction(torch.autograd.Function):
    """Ring attention: 1 pack keys and values, 2 compute each block, 3 merge it into the context."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: RingCall) -> Tensor:
        """Compute the context; save the packed keys for the backward pass."""
        # 1
        shapes = (_first(k).shape, _first(v).shape)
        keys = _packed(k, v, call)
        length, rank = q.shape[2], call.traffic.rank
        kind = kernels.kind_of(q, v, call.documents is not None)
        out = logs = None
        # 2
        for owner, parcel, ring in _around(keys, call):
            what = call.part(rank, owner, length)
            if what is None:
                continue
            ks, vs = (k, v) if owner == rank else _opened(ring, parcel, what, shapes, k.dtype)
            mask, rows = call.mask(what, owner), what.queries
            context, more = kernels.forward(q[:, :, rows], ks, vs, mask, call.scale, kind)
            # 3
            if out is None or logs is None:
                out, logs = context.to(accumulator(q.dtype)), more
            else:
                merge(out[:, :, rows], logs[:, :, rows], context, more)
        assert out is not None and logs is not None
        result = out.to(q.dtype)
        ctx.sealed, message = (None, None) if keys is None else keys.seal()
        ctx.save_for_backward(q, k, v, result, logs, message)
        ctx.call, ctx.kind, ctx.shapes = call, kind, shapes
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Compute the gradients; keys and values go round the ring once more."""
        q, k, v, out, logs, message = ctx.saved_tensors
        call, keys = ctx.call, None
        if ctx.sealed is not None:
            keys = call.traffic.again(ctx.sealed, message, lambda: _stretches(k, v, call))
        grads = _Backward(call, ctx.kind, q, k, v, out, logs, grad, ctx.shapes)
        return (*grads.run(keys), None)


@dataclass(eq=False)
class _Backward:
    """Run the backward pass: query gradients stay, key and value gradients go to their owners."""

    _call: RingCall
    _kind: kernels.Kind
    _q: Tensor
    _k: Tensor
    _v: Tensor
    _out: Tensor
    _logs: Tensor
    _grad: Tensor
    _shapes: tuple[torch.Size, torch.Size]

    def __post_init__(self) -> None:
        wide, device = accumulator(self._q.dtype), self._q.device
        self._delta = (self._out.to(wide) * self._grad.to(wide)).sum(-1)
        self._grad_q = torch.zeros(self._q.shape, dtype=wide, device=device)
        # gradients of keys and values in the layout in which they travel, sequence dimension first
        self._totals = [torch.zeros(s, dtype=wide, device=device) for s in self._shapes]

    def run(self, keys: RingKV | None) -> tuple[Tensor, Tensor, Tensor]:
        """1 send a block's gradients to their owner, 2 compute a block, 3 add the last gradients.

        A block's gradients share the link with the next block's keys, and are sent only after this
        rank has received and forwarded those: other ranks wait for keys, not yet for gradients.
        """
        call, (k, v) = self._call, (self._k, self._v)
        rank, ranks, length = call.traffic.rank, call.traffic.ranks, self._q.shape[2]
        gradients = call.traffic.gradients(
            k.numel() + v.numel(),
            k.dtype,
            k.device,
            lambda step: self._expected((rank + step) % ranks),
        )
        packed: PackedMessage | None = None
        for step, (owner, parcel, ring) in enumerate(_around(keys, call)):
            # 1
            if step > 1:
                gradients.send(step - 1, packed)
            # 2
            what, parts = call.part(rank, owner, length), None
            if what is not None:
                ks, vs = (
                    (k, v) if owner == rank else _opened(ring, parcel, what, self._shapes, k.dtype)
                )
                parts = self._block(ks, vs, what, owner)
            if owner == rank:
                assert parts is not None
                for total, values in zip(self._totals, parts, strict=True):
                    total += _first(values)
                continue
            flat = parts and [_first(p).to(k.dtype).contiguous().view(-1) for p in parts]
            packed = gradients.pack(flat)
            self._add(gradients, under_way=1)
        # 3
        if ranks > 1:
            gradients.send(ranks - 1, packed)
            self._add(gradients, under_way=0)
            gradients.record()
        grad_k, grad_v = (total.permute(1, 2, 0, 3) for total in self._totals)
        return self._grad_q.to(self._q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)

    def _block(self, ks: Tensor, vs: Tensor, what: BlockPart, owner: int) -> tuple[Tensor, Tensor]:
        """Return a block's gradients of keys and values; add its query gradients in place."""
        rows, call = what.queries, self._call
        grad_q, grad_k, grad_v = kernels.backward(
            self._grad[:, :, rows], self._q[:, :, rows], ks, vs, self._out[:, :, rows],
            self._delta[:, :, rows], self._logs[:, :, rows], call.mask(what, owner), call.scale,
            self._kind,
        )  # fmt: skip
        self._grad_q[:, :, rows] += grad_q
        return grad_k, grad_v

    def _expected(self, sender: int) -> Contents | None:
        """Return the sizes of the gradients from ``sender`` to this rank; None: no message."""
        what = self._call.part(sender, self._call.traffic.rank, self._q.shape[2])
        if what is None:
            return None
        return Contents(tuple(total[what.keys].numel() for total in self._totals), self._k.dtype)

    def _add(self, gradients: Gradients, under_way: int) -> None:
        """Add received gradients to the totals, except those of the last ``under_way`` steps."""
        for came in gradients.arrived(under_way):
            numels = came.contents.numels
            flat = [t.view(-1)[:n] for t, n in zip(self._totals, numels, strict=True)]
            gradients.add(came, flat)


def _first(values: Tensor) -> Tensor:
    """View (B, K, S, D) as (S, B, K, D), so that a part of the sequence is contiguous."""
    return values.permute(2, 0, 1, 3)


def _packed(k: Tensor, v: Tensor, call: RingCall) -> RingKV | None:
    """Pack keys and values for the ring; return None if there is only one rank."""
    return None if call.traffic.ranks == 1 else call.traffic.keys(_stretches(k, v, call))


def _stretches(k: Tensor, v: Tensor, call: RingCall) -> list[Tensor]:
    """Cut keys and values into a message's flat tensors, first half of the sequence first."""
    pairs = zip(*(_first(t).contiguous().chunk(call.halves) for t in (k, v)), strict=True)
    return [values.reshape(-1) for pair in pairs for values in pair]


def _around(keys: RingKV | None, call: RingCall) -> Any:
    """Iterate ``keys.around()``; without messages (``keys`` None) yield this rank only."""
    return iter([(call.traffic.rank, None, None)]) if keys is None else keys.around()


def _opened(
    ring: Ring,
    parcel: PackedMessage,
    what: BlockPart,
    shapes: tuple[torch.Size, torch.Size],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Decode the keys and values (B, K, T, D) of another rank that a block needs."""
    opened = []
    for which, shape in enumerate(shapes):
        length = what.keys.stop
        out = torch.empty((length, *shape[1:]), dtype=dtype, device=parcel.message.device)
        position, flat = 0, out.view(-1)
        for index in range(which, len(parcel.contents.numels), 2):
            numel = parcel.contents.numels[index]
            if position < flat.numel():
                ring.open(parcel, index, flat[position : position + numel])
            position += numel
        opened.append(out.permute(1, 2, 0, 3))
    return opened[0], opened[1]
