"""Sum exactly the gradients of vectors that all tensor-parallel ranks hold.

Every tensor rank has a copy of norms and biases and updates it from its data-parallel group's
reduction. A lossy codec's error may depend on neighbouring values, which in a bucket are pieces of
cut parameters, different on every tensor rank: the copies would drift apart (measured: norms of two
tensor ranks differ after three steps at 4 bits). So these gradients, about a thousandth of all, are
replaced by zeros in the message and summed natively in another. Matrices that are not cut (AutoTP's
embeddings) are too large for that: if there are common parameters, every parameter is encoded
independently (``Channel.handling``), so equal values are decoded to equal values.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import Work

from hybridcomp.channels.residuals.pieces import Piece
from hybridcomp.collectives import Group, Meter
from hybridcomp.collectives.wire import transport


@dataclass(frozen=True)
class Stretch:
    """Elements ``[low, high)`` of the tensor ``index`` of a message."""

    index: int
    low: int
    high: int


def stretches_of(pieces: Sequence[Sequence[Piece]], names: Collection[str]) -> list[Stretch]:
    """Locate the parameters ``names`` in the tensors described by ``pieces``."""
    found = []
    for index, of_tensor in enumerate(pieces):
        position = 0
        for piece in of_tensor:
            if piece.name in names and piece.numel:
                found.append(Stretch(index, position, position + piece.numel))
            position += piece.numel
    return found


class UncompressedParams:
    """Sum slices of a message over ``group`` in fp32, while its other values are encoded.

    It replaces the slices in ``tensors`` (1-D) by zeros; ``meter`` counts their bytes. Every rank
    of the group has the same slices.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        stretches: Sequence[Stretch],
        group: Group,
        meter: Meter,
    ) -> None:
        self._stretches = stretches
        parts = [tensors[s.index][s.low : s.high] for s in stretches]
        self._sums = torch.cat([part.float() for part in parts])
        for part in parts:
            part.zero_()
        self._work: Work | None = transport.all_reduce(self._sums, group, meter)

    def put(self, out: Tensor, index: int = 0, start: int = 0) -> None:
        """Write the sums into ``out``, which holds tensor ``index`` from element ``start`` on."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        position, stop = 0, start + out.numel()
        for stretch in self._stretches:
            low, high = max(stretch.low, start), min(stretch.high, stop)
            if stretch.index == index and low < high:
                first = position + low - stretch.low
                out[low - start : high - start].copy_(self._sums[first : first + high - low])
            position += stretch.high - stretch.low
