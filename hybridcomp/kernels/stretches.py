"""Stretches of tensors whose places a plan knows, and their table on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class PlannedStretch(NamedTuple):
    """Values of one tensor that have a payload of their own, by their positions.

    Attributes:
        values: first element in the tensor that is encoded or that this rank adds.
        numel: elements.
        payload: first byte in the buffer of the payloads.
        out: first element of what is decoded or summed.
    """

    values: int
    numel: int
    payload: int
    out: int = 0


@dataclass(frozen=True, eq=False)
class StretchTable:
    """Stretches on a device, for every message that is cut in the same way.

    Attributes:
        words: int64 (count, 5) on the device, rows of ``kernels/cuda/table.h``.
        blocks: thread blocks of a launch over all rows; 0: there is nothing to launch.
    """

    words: Tensor
    count: int
    blocks: int
