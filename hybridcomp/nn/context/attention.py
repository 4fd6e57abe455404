"""Ring attention: every rank holds a part of the sequence, and keys and values go round.

Blockwise attention over a sequence that is sharded over ranks (Li et al., arXiv 2105.13120; Liu et
al., arXiv 2310.01889). A rank computes with the keys and values that it holds while it receives the
next ones, and merges partial results by their rows' log-sum-exp (``blocks.merge``). ``traffic`` has
the messages, and ``layout`` decides which tokens a rank holds.

Shapes: B samples, H heads of queries, K heads of keys and values, S tokens of this rank, D width.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from hybridcomp.job.autocast import cast
from hybridcomp.nn.context.layout import LAYOUTS, Layout, shard
from hybridcomp.nn.context.passes import RingCall, RingFunction
from hybridcomp.nn.context.traffic import RingTraffic
from hybridcomp.session import process

COVERS = ("cp",)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    layout: Layout = "zigzag",
    documents: Tensor | None = None,
) -> Tensor:
    """Compute attention over sequences that are sharded over ``group``, with gradients.

    Every rank of the group calls it, with equal shapes and in the same order. Messages use the
    settings of dimension ``cp`` in this process's block; without a block they are native.

    Args:
        q: queries (B, H, S, D) of the tokens that this rank holds; see ``shard``.
        k: keys (B, K, S, D); K divides H (grouped queries).
        v: values (B, K, S, E).
        group: the context-parallel group; None: all ranks.
        causal: whether a token attends only to itself and earlier tokens.
        scale: factor of the scores; None: 1 / sqrt(D).
        layout: how sequences are sharded: ``zigzag``, or ``contiguous``, which leaves the first
            ranks idle under a causal mask.
        documents: document numbers of the whole sequence, (B or 1, tokens), equal on every rank. A
            token attends only to tokens with its own number; -1 is padding. None: one document.

    ``torch.autocast`` casts q, k and v, as for ``scaled_dot_product_attention``.

    Returns the context (B, H, S, E), of the dtype of ``q``; B and S may be 0. Raises ValueError on
    shapes that do not fit.
    """
    q, k, v = cast(q, k, v)
    _check(q, k, v, layout)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    length = q.shape[2]
    if layout == "zigzag" and ranks > 1 and length % 2:
        raise ValueError(f"q: expected two chunks of equal length, found {length} tokens a rank")
    held = None
    if documents is not None:
        held = _documents(documents, q.shape[0], length, ranks, group, layout)
    if not q.shape[0] or not length:  # nothing to send on any rank
        nothing = q.sum() + k.sum() + v.sum()
        return nothing.to(q.dtype).expand(*q.shape[:3], v.shape[3]).contiguous()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    traffic = RingTraffic(process.known() if ranks > 1 else None, group, rank, ranks)
    call = RingCall(traffic, causal, float(scale), layout, held)
    out: Tensor = RingFunction.apply(q, k, v, call)  # type: ignore[no-untyped-call]
    return out


class RingAttention(nn.Module):
    """``ring_attention`` as a module, for any order of the batch, head and sequence dimensions.

    Args:
        group, causal, scale, layout: as for ``ring_attention``.
        order: dimensions of its inputs and its result: "bhsd", "bshd" (DeepSpeed's
            DistributedAttention with a batch first) or "sbhd" (Megatron's).
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        causal: bool = True,
        scale: float | None = None,
        layout: Layout = "zigzag",
        order: str = "bhsd",
    ) -> None:
        super().__init__()
        if sorted(order) != sorted("bhsd"):
            raise ValueError(f'order: expected the letters of "bhsd", found {order!r}')
        self.group, self.causal, self.scale, self.layout = group, causal, scale, layout
        self._there = tuple(order.index(name) for name in "bhsd")
        self._back = tuple("bhsd".index(name) for name in order)

    def __deepcopy__(self, memo: dict[int, Any]) -> RingAttention:
        """Copy all but the group: a copy of a model, for averaged weights, shares it."""
        memo[id(self)] = copied = type(self).__new__(type(self))
        memo[id(self.group)] = self.group
        vars(copied).update(deepcopy(vars(self), memo))
        return copied

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, **more: Any
    ) -> Tensor:
        """Compute the context, with dimensions in ``order``, as those of ``q``.

        ``more``: options of other attention functions; raises ValueError unless all are None.
        """
        for name, value in more.items():
            if value is not None:
                raise ValueError(f"{name}: ring attention has no such option; leave it out")
        q, k, v = (values.permute(self._there) for values in (q, k, v))
        out = ring_attention(
            q, k, v, self.group, causal=self.causal, scale=self.scale, layout=self.layout,
            documents=documents,
        )  # fmt: skip
        return out.permute(self._back)


def _check(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> None:
    """Raise ValueError unless the shapes fit."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {LAYOUTS}, found {layout!r}")
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"expected (batch, heads, tokens, width) each, found {shapes}")
    same = q.shape[0] == k.shape[0] == v.shape[0] and q.shape[2] == k.shape[2] == v.shape[2]
    if not same or k.shape[1] != v.shape[1] or q.shape[3] != k.shape[3]:
        raise ValueError(f"expected equal batches, tokens and widths, found {shapes}")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"expected heads of queries that are a multiple of the keys', found {shapes}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"expected one dtype, found {q.dtype}, {k.dtype}, {v.dtype}")


def _documents(
    whole: Tensor,
    batch: int,
    length: int,
    ranks: int,
    group: dist.ProcessGroup | None,
    layout: Layout,
) -> list[Tensor]:
    """Shard the document numbers of the whole sequence; return every rank's part, by rank."""
    if whole.dim() != 2 or whole.shape[0] not in (1, batch) or whole.shape[1] != length * ranks:
        raise ValueError(
            f"documents: expected ({batch} or 1, {length * ranks}), all tokens of {ranks} ranks, "
            f"found {tuple(whole.shape)}"
        )
    return [shard(whole, group, layout=layout, rank=rank) for rank in range(ranks)]
