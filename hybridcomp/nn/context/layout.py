"""Shard a sequence over context-parallel ranks, and select what a rank computes of a block.

With a causal mask, the first tokens of a sequence attend to few tokens and the last ones to all.
The layout ``zigzag`` cuts a sequence into two chunks per rank; rank r of N holds the chunks r and
2 N - 1 - r, so that all ranks compute equally much in every step of the ring. Megatron shards
sequences in the same way. ``contiguous`` has one chunk per rank, for attention without a mask, or
for sequences that are already sharded like that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.job import small_messages

Layout = Literal["zigzag", "contiguous"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


@dataclass(frozen=True)
class BlockPart:
    """Queries and keys of a block that a rank computes, as slices of the tokens that ranks hold.

    ``causal``: row i of the slice sees keys 0 to i; otherwise all keys.
    """

    queries: slice
    keys: slice
    causal: bool


def chunks_of(rank: int, ranks: int, layout: Layout) -> tuple[int, ...]:
    """Return the numbers of the chunks that ``rank`` holds, in the order of its tokens."""
    return (rank, 2 * ranks - 1 - rank) if layout == "zigzag" and ranks > 1 else (rank,)


def part(
    rank: int, owner: int, length: int, *, ranks: int, causal: bool, layout: Layout
) -> BlockPart | None:
    """Select what ``rank`` computes with the keys of ``owner``; None: nothing, all are masked.

    ``length``: tokens that each rank holds.
    """
    whole = slice(0, length)
    if not causal or rank == owner:
        return BlockPart(whole, whole, causal)
    if layout == "contiguous":
        return BlockPart(whole, whole, False) if owner < rank else None
    half = length // 2
    if owner < rank:  # only the owner's first chunk precedes this rank's two chunks
        return BlockPart(whole, slice(0, half), False)
    return BlockPart(slice(half, length), whole, False)


def check_length(length: int, ranks: int, layout: Layout) -> None:
    """Raise ValueError if ``length`` tokens cannot be sharded over ``ranks``."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {LAYOUTS}, found {layout!r}")
    chunks = ranks * len(chunks_of(0, ranks, layout))
    if length % chunks:
        raise ValueError(
            f"sequence of {length} tokens: expected a multiple of {chunks}, the chunks of "
            f"{ranks} ranks in layout {layout!r}; pad it to {-(-length // chunks) * chunks}"
        )


def shard(
    whole: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    dim: int = 1,
    layout: Layout = "zigzag",
    rank: int | None = None,
) -> Tensor:
    """Return the part of ``whole`` that a rank of ``group`` holds, as a new tensor.

    Args:
        whole: tokens, labels, position ids or hidden states of whole sequences.
        group: the context-parallel group; None: all ranks.
        dim: the dimension of the sequence.
        layout: how sequences are sharded, as in ``ring_attention``.
        rank: index in the group of the rank whose part is returned; None: this rank.

    Raises ValueError if the sequence cannot be sharded evenly.
    """
    ranks = dist.get_world_size(group)
    me = dist.get_rank(group) if rank is None else rank
    check_length(whole.shape[dim], ranks, layout)
    chunks = whole.chunk(ranks * len(chunks_of(me, ranks, layout)), dim)
    return torch.cat([chunks[number] for number in chunks_of(me, ranks, layout)], dim)


def unshard(parts: Sequence[Tensor], *, dim: int = 1, layout: Layout = "zigzag") -> Tensor:
    """Join the parts of all ranks, in rank order, to whole sequences; the inverse of ``shard``."""
    ranks = len(parts)
    placed: dict[int, Tensor] = {}
    for rank, held in enumerate(parts):
        numbers = chunks_of(rank, ranks, layout)
        placed |= dict(zip(numbers, held.chunk(len(numbers), dim), strict=True))
    return torch.cat([placed[number] for number in sorted(placed)], dim)


def gather(
    held: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    dim: int = 1,
    layout: Layout = "zigzag",
) -> Tensor:
    """All-gather the parts of ``group`` natively and ``unshard`` them; without gradients."""
    return unshard(small_messages.gather(held, group), dim=dim, layout=layout)


def positions(
    length: int,
    group: dist.ProcessGroup | None = None,
    *,
    layout: Layout = "zigzag",
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the positions, int64, of this rank's tokens of a sequence of ``length`` tokens."""
    return shard(torch.arange(length, device=device), group, dim=0, layout=layout)


def documents_of(cu_seqlens: Tensor, length: int) -> Tensor:
    """Return the document numbers, int32 (1, length), of tokens of back-to-back sequences.

    ``cu_seqlens``: the start of each sequence and the end of the last, as for FlashAttention.
    Tokens after the last sequence are padding: -1.
    """
    places = torch.arange(length, device=cu_seqlens.device)
    numbers = torch.searchsorted(cu_seqlens.to(places.dtype), places, right=True) - 1
    numbers = numbers.masked_fill(places >= cu_seqlens[-1], -1)
    return numbers.to(torch.int32).unsqueeze(0)


def documents_of_mask(mask: Tensor) -> Tensor:
    """Return document numbers, int32, for a padding mask (B, S): 0 where nonzero, else -1."""
    return (mask != 0).to(torch.int32) - 1
