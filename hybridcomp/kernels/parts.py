"""Parts of a flat tensor with a payload each, as a table that kernels read."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

Offsets = npt.NDArray[np.int64]


class Parts:
    """Places of parts in a tensor and of their payloads in a buffer; empty parts are left out.

    Offsets count from the start of both, so that one table serves all messages of one shape.

    Args:
        starts, numels: first element and number of elements of each part, int64.
        payloads: first byte of its payload, int64, a multiple of 16.
    """

    def __init__(self, starts: Offsets, numels: Offsets, payloads: Offsets) -> None:
        full = numels.nonzero()[0]
        if len(full) < len(numels):
            starts, numels, payloads = starts[full], numels[full], payloads[full]
        self.starts, self.numels, self.payloads = starts, numels, payloads

    def __len__(self) -> int:
        return len(self.numels)

    @cached_property
    def rows(self) -> Offsets:
        """Rows of ``Part`` in ``cuda/parts.h``: number of the first tile, start, numel, payload."""
        rows = np.empty((len(self), 4), dtype=np.int64)
        tiles = self._tiles
        np.cumsum(tiles, out=rows[:, 0])
        rows[:, 0] -= tiles
        rows[:, 1], rows[:, 2], rows[:, 3] = self.starts, self.numels, self.payloads
        return rows

    @cached_property
    def tiles(self) -> int:
        """Number of tiles of all parts."""
        return int(self._tiles.sum())

    @cached_property
    def _tiles(self) -> Offsets:
        return (self.numels + (TILE - 1)) >> TILE.bit_length() - 1


#: elements that a warp encodes, a power of two: a shift takes a fifth of a division's time
TILE = 1024
