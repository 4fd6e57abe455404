"""Ranges of parameters in checkpoint coordinates, and their division among ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, order=True)
class WeightRange:
    """A part of a parameter: ``runs`` rows of ``length`` values each, ``stride`` values apart.

    Row i holds the flat offsets ``start + i * stride`` to ``start + i * stride + length``. One row
    is a contiguous range; several rows are a block of a matrix that is not cut along its first
    dimension.
    """

    name: str
    start: int
    length: int
    runs: int = 1
    stride: int = 0

    @property
    def numel(self) -> int:
        """Return the number of values."""
        return self.length * self.runs

    @property
    def end(self) -> int:
        """Return the flat offset after the last value."""
        return self.start + (self.runs - 1) * self.stride + self.length

    def cut(self, low: int, high: int) -> WeightRange:
        """Return values ``low`` to ``high`` of this range: whole rows, or part of one row."""
        if self.runs == 1:
            return WeightRange(self.name, self.start + low, high - low)
        row = low // self.length
        start = self.start + row * self.stride + low % self.length
        if (high - 1) // self.length == row:
            return WeightRange(self.name, start, high - low)
        assert low % self.length == 0 == high % self.length, "rows are cut between each other"
        runs = (high - low) // self.length
        return WeightRange(self.name, start, self.length, runs, self.stride if runs > 1 else 0)

    def border(self, position: int) -> int:
        """Return the nearest position at or below ``position`` at which this range may be cut."""
        return position if self.runs == 1 else position - position % self.length

    def pieces(self, limit: int) -> Iterator[tuple[int, int]]:
        """Yield bounds, for ``cut``, of pieces of at most ``limit`` values."""
        whole_rows = self.runs > 1 and self.length <= limit
        step = limit - limit % self.length if whole_rows else limit
        unit = self.numel if whole_rows or self.runs == 1 else self.length
        for begin in range(0, self.numel, max(1, unit)):
            for low in range(begin, begin + unit, step):
                yield low, min(low + step, begin + unit)

    def of(self, flat: Tensor) -> Tensor:
        """Return a view of this range in ``flat``, the parameter's values: (runs, length).

        A single row is returned 1-D.
        """
        if self.runs == 1:
            return flat[self.start : self.end]
        return torch.as_strided(flat, (self.runs, self.length), (self.stride, 1), self.start)

    def offsets(self, local: Tensor) -> Tensor:
        """Return the flat offsets in the parameter of positions in this range, as int64."""
        local = local.to(torch.int64)
        if self.runs == 1:
            return local + self.start
        rows = torch.div(local, self.length, rounding_mode="floor")
        return self.start + rows * self.stride + local % self.length


def stretch_of_block(
    name: str, shape: Sequence[int], offset: Sequence[int], local: Sequence[int]
) -> WeightRange | None:
    """Return the range of a block of a tensor; None if its rows are not evenly spaced.

    ``shape``: shape of the tensor; ``offset``: start of the block in each dimension; ``local``:
    shape of the block.
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start = sum(at * stride for at, stride in zip(offset, strides, strict=True))
    numel = math.prod(local)
    cut = [dim for dim in range(len(shape)) if local[dim] != shape[dim]]
    if numel == 0 or not cut:
        return WeightRange(name, start, numel)
    last = cut[-1]
    length = local[last] * strides[last]
    outer = [dim for dim in range(last) if local[dim] > 1]
    if not outer:
        return WeightRange(name, start, length)
    # rows are evenly spaced if all outer dimensions except the first are whole
    if any(local[dim] != shape[dim] for dim in range(outer[0] + 1, last)):
        return None
    return WeightRange(name, start, length, numel // length, shape[last] * strides[last])


def divide(held: Sequence[Sequence[WeightRange]], place: int) -> list[tuple[int, int, int]]:
    """Divide ranges evenly among the ranks that hold the same values; each value has one owner.

    Args:
        held: the ranges of each rank.
        place: index of this rank.

    Returns what this rank owns: (index in its list of ranges, low, high) for each owned part.
    """
    holders: dict[WeightRange, list[int]] = {}
    for rank, stretches in enumerate(held):
        for stretch in stretches:
            if stretch.numel and rank not in (known := holders.setdefault(stretch, [])):
                known.append(rank)
    together: dict[tuple[int, ...], list[WeightRange]] = {}
    for stretch, known in sorted(holders.items()):
        together.setdefault(tuple(known), []).append(stretch)
    at = {stretch: number for number, stretch in enumerate(held[place])}
    found = []
    for ranks, stretches in together.items():
        if place not in ranks:
            continue
        total, mine = sum(one.numel for one in stretches), ranks.index(place)
        low, high = (total * (mine + n) // len(ranks) for n in (0, 1))
        begin = 0
        for one in stretches:
            first = one.border(min(max(low - begin, 0), one.numel))
            last = one.border(min(max(high - begin, 0), one.numel))
            begin += one.numel
            if first < last:
                found.append((at[one], first, last))
    return sorted(found)
