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

    numel: int
    chunk: int  # elements of a rank's chunk, the last ones padded


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
        self.rows, self.columns = world_size, 0
        for numel in numels:
            chunk = chunk_of(numel, world_size)
            self._parameters.append(_Parameter(numel, chunk))
            self.columns += chunk
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
        """Multiply ``gradients`` by ``factor`` in place and write them into the table ``flat``.

        In as few operations as a bucket takes, since the backward pass waits for its host: one for
        the factor, one for all parameters, two for each that its chunks do not fill. Zeros are
        their padding.
        """
        parts = []
        for place, values in zip(
            self._parameters, self._split(gradients.mul_(factor)), strict=True
        ):
            if place.numel < self.rows * place.chunk:
                padded = values.new_zeros(self.rows * place.chunk)
                padded[: place.numel].copy_(values)
                values = padded
            parts.append(values.view(self.rows, place.chunk))
        torch.cat(parts, dim=1, out=flat.view(self.rows, self.columns))

    def unpack(self, flat: Tensor, gradients: Tensor) -> None:
        """Write the table ``flat`` back into ``gradients``."""
        chunks = [place.chunk for place in self._parameters]
        columns = torch.split(flat.view(self.rows, self.columns), chunks, dim=1)
        places, sums = [], []
        for place, values, part in zip(
            self._parameters, self._split(gradients), columns, strict=True
        ):
            if place.numel < self.rows * place.chunk:
                values.copy_(part.reshape(-1)[: place.numel])
            else:
                places.append(values.view(self.rows, place.chunk))
                sums.append(part)
        if places:
            torch._foreach_copy_(places, sums)

    def _split(self, gradients: Tensor) -> Sequence[Tensor]:
        """Return the part of each parameter in the bucket."""
        return torch.split(gradients, [place.numel for place in self._parameters])
