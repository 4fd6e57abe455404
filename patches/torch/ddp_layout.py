"""Lay out a bucket of gradients so that a lossy codec encodes each parameter independently.

DDP fills other buckets in the first step of a process than in later ones. A codec's error may
depend on neighbouring values and on where a rank's chunk begins: so a resumed run would differ from
an uninterrupted one in its first step. Here every parameter is cut into one chunk for each rank,
and all chunks begin at multiples of 32 elements, where codec blocks begin; a message is a table
with a row for each rank. The decoded values of a parameter then depend on that parameter alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridcomp.channels.pieces import Piece
from hybridcomp.collectives.wire.cuts import CHUNK_ALIGN


@dataclass(frozen=True)
class _Parameter:
    """One parameter of a bucket."""

    start: int  # in the bucket
    numel: int
    column: int  # where its chunks begin in a row
    chunk: int  # elements of a rank's chunk, the last ones padded

    @property
    def whole(self) -> int:
        """Return the number of rows that it fills completely."""
        return self.numel // self.chunk


def chunk_of(numel: int, world_size: int) -> int:
    """Return the elements of a rank's chunk of a parameter of ``numel``, padding included."""
    even = -(-numel // world_size)
    return max(1, -(-even // CHUNK_ALIGN)) * CHUNK_ALIGN


class BucketLayout:
    """Table of one bucket: a row for each rank, columns for each parameter."""

    def __init__(self, names: Sequence[str], numels: Sequence[int], world_size: int) -> None:
        """Lay out the bucket's parameters, with these names and elements, in their order."""
        self._parameters: list[_Parameter] = []
        self._names = names
        self.rows, start, column = world_size, 0, 0
        for numel in numels:
            chunk = chunk_of(numel, world_size)
            self._parameters.append(_Parameter(start, numel, column, chunk))
            start, column = start + numel, column + chunk
        self.columns = column
        self.pieces = tuple(piece for row in range(world_size) for piece in self._row(row))

    def _row(self, row: int) -> list[Piece]:
        """Return the pieces of one rank's row: the parameters' chunks and their padding."""
        found = []
        for name, place in zip(self._names, self._parameters, strict=True):
            low = min(row * place.chunk, place.numel)
            held = min(place.chunk, place.numel - low)
            if held:
                found.append(Piece(name, low, held))
            if held < place.chunk:
                found.append(Piece("", 0, place.chunk - held))
        return found

    @property
    def numel(self) -> int:
        """Return the elements of the table."""
        return self.rows * self.columns

    def pack(self, gradients: Tensor, factor: float, flat: Tensor) -> None:
        """Write ``factor`` times ``gradients`` into the table ``flat``, with zeros as padding."""
        table = flat.view(self.rows, self.columns)
        for place, (values, whole, rest) in zip(
            self._parameters, self._views(gradients, table), strict=True
        ):
            torch.mul(values[: whole.numel()].view_as(whole), factor, out=whole)
            torch.mul(values[whole.numel() :], factor, out=rest)
            if place.numel < self.rows * place.chunk:
                columns = table[:, place.column : place.column + place.chunk]
                columns[place.whole, rest.numel() :].zero_()
                columns[place.whole + 1 :].zero_()

    def unpack(self, flat: Tensor, gradients: Tensor) -> None:
        """Write the table ``flat`` back into ``gradients``."""
        for values, whole, rest in self._views(gradients, flat.view(self.rows, self.columns)):
            values[: whole.numel()].view_as(whole).copy_(whole)
            values[whole.numel() :].copy_(rest)

    def _views(self, gradients: Tensor, table: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return views for every parameter: its gradient, its full rows, its part of one more."""
        found = []
        for place in self._parameters:
            values = gradients[place.start : place.start + place.numel]
            columns = table[:, place.column : place.column + place.chunk]
            left = place.numel - place.whole * place.chunk
            rest = columns[place.whole, :left] if left else columns[0, :0]
            found.append((values, columns[: place.whole], rest))
        return found
