"""Shards that a reduce-scatter sends: a list of tensors, or one tensor that nobody cuts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from torch import Tensor

from hybridcomp.collectives.fused import adjacent


class Shards(Sequence[Tensor]):
    """A flat tensor as shards, one for each rank, that nobody cuts until asked.

    Attributes:
        flat: 1-D and contiguous.
        numel: elements of a shard; the last one may be shorter.
    """

    def __init__(self, flat: Tensor, numel: int) -> None:
        self.flat, self.numel = flat, numel

    def __len__(self) -> int:
        return -(-self.flat.numel() // self.numel) if self.numel else 0

    @overload
    def __getitem__(self, rank: int) -> Tensor: ...

    @overload
    def __getitem__(self, rank: slice) -> list[Tensor]: ...

    def __getitem__(self, rank: int | slice) -> Tensor | list[Tensor]:
        if isinstance(rank, slice):
            return [self[each] for each in range(*rank.indices(len(self)))]
        place = range(len(self))[rank] * self.numel
        return self.flat[place : place + self.numel]


def joined(shards: Sequence[Tensor]) -> Tensor | None:
    """Return the shards as one tensor if they are one in memory, else None."""
    return shards.flat if isinstance(shards, Shards) else adjacent(shards)
