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
        full = numels > 0
        self.starts, self.numels, self.payloads = starts[full], numels[full], payloads[full]

    def __len__(self) -> int:
        return len(self.numels)

    @cached_property
    def rows(self) -> Offsets:
        """Rows of ``Part`` in ``cuda/parts.h``: number of the first tile, start, numel, payload."""
        ends = self._tiles.cumsum()
        return np.stack((ends - self._tiles, self.starts, self.numels, self.payloads), axis=1)

    @cached_property
    def tiles(self) -> int:
        """Number of tiles of all parts."""
        return int(self._tiles.sum())

    @property
    def _tiles(self) -> Offsets:
        return -(-self.numels // TILE)


#: elements that a warp encodes
TILE = 1024
