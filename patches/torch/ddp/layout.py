"""Lay out a bucket of gradients so that a lossy codec encodes each parameter independently.

DDP's buckets in the first step of a process differ from those in later steps. A codec's error may
depend on neighbouring values and on where a rank's chunk begins: so a resumed run would differ from
an uninterrupted one in its first step. Here every parameter is cut into one chunk for each rank,
and all chunks begin at multiples of 32 elements, where codec blocks begin; a message is a table
with a row for each rank. The decoded values of a parameter then depend on that parameter alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridcomp.channels.residuals.pieces import Piece
from hybridcomp.collectives.wire.chunking import CHUNK_ALIGN


def chunk_of(numel: int, world_size: int) -> int:
    """Return the elements of a rank's chunk of a parameter of ``numel``, padding included."""
    even = -(-numel // world_size)
    return max(1, -(-even // CHUNK_ALIGN)) * CHUNK_ALIGN


class BucketLayout:
    """Table of one bucket: a row for each rank, columns for each parameter."""

    def __init__(self, names: Sequence[str], numels: Sequence[int], world_size: int) -> None:
        """Lay out the bucket's parameters, with these names and elements, in their order."""
        self._names, self._numels = names, list(numels)
        self._chunks = [chunk_of(numel, world_size) for numel in numels]
        self.rows, self.columns = world_size, sum(self._chunks)
        self.pieces = tuple(piece for row in range(world_size) for piece in self._row(row))

    def _row(self, row: int) -> list[Piece]:
        """Return the pieces of one rank's row: the parameters' chunks and their padding."""
        found = []
        for name, numel, chunk in zip(self._names, self._numels, self._chunks, strict=True):
            low = min(row * chunk, numel)
            held = min(chunk, numel - low)
            if held:
                found.append(Piece(name, low, held))
            if held < chunk:
                found.append(Piece("", 0, chunk - held))
        return found

    @property
    def numel(self) -> int:
        """Return the elements of the table."""
        return self.rows * self.columns

    def pack(self, gradients: Tensor, factor: float, flat: Tensor) -> None:
        """Multiply ``gradients`` by ``factor`` in place and write them into the table ``flat``.

        The backward pass waits for the host, so this takes few operations: one for the factor, one
        for all parameters, and two for each parameter that needs padding with zeros.
        """
        parts = []
        for values, chunk in zip(self._split(gradients.mul_(factor)), self._chunks, strict=True):
            if len(values) < self.rows * chunk:
                padded = values.new_zeros(self.rows * chunk)
                padded[: len(values)].copy_(values)
                values = padded
            parts.append(values.view(self.rows, chunk))
        torch.cat(parts, dim=1, out=flat.view(self.rows, self.columns))

    def unpack(self, flat: Tensor, gradients: Tensor) -> None:
        """Write the table ``flat`` back into ``gradients``."""
        columns = torch.split(flat.view(self.rows, self.columns), self._chunks, dim=1)
        places, sums = [], []
        for values, part in zip(self._split(gradients), columns, strict=True):
            if len(values) < part.numel():
                values.copy_(part.reshape(-1)[: len(values)])
            else:
                places.append(values.view_as(part))
                sums.append(part)
        if places:
            torch._foreach_copy_(places, sums)

    def _split(self, gradients: Tensor) -> Sequence[Tensor]:
        """Split a bucket's gradients into one tensor per parameter."""
        return torch.split(gradients, self._numels)
