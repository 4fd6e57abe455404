"""Quantize to symmetric integers with a scale per group, optionally after a rotation.

qgZ, qwZ and SDP4Bit share this quantizer, here in eager torch. Rows are messages: row d of an
encoding goes to member d of the group.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

#: side of the Hadamard matrix of SDP4Bit (arXiv 2410.15526, section 3.2)
SIDE = 32


@dataclass(frozen=True)
class Blocks:
    """``bits``-bit integers (4 or 8), one fp32 scale per ``group`` values, rounded to nearest.

    Zero is a level; the largest magnitude of a group is level ``2 ** (bits - 1) - 1``. ``rotate``:
    multiply groups by a Hadamard matrix first, which spreads outliers.
    """

    bits: int
    group: int
    rotate: bool = False

    def __post_init__(self) -> None:
        assert self.bits in (4, 8) and self.group % SIDE == 0

    @property
    def top(self) -> int:
        """The largest level."""
        return int(2 ** (self.bits - 1)) - 1

    def row_nbytes(self, count: int) -> int:
        """Return the bytes of a row of ``count`` values: codes, then scales."""
        groups = -(-count // self.group)
        return groups * self.group * self.bits // 8 + 4 * groups

    def encode(self, values: Tensor) -> Tensor:
        """Encode (rows, count) fp32 to (rows, bytes) uint8."""
        rows, count = values.shape
        padded = F.pad(values, (0, -count % self.group))
        if self.rotate:
            padded = turn(padded)
        grouped = padded.view(rows, -1, self.group)
        scales = grouped.abs().amax(dim=2) / self.top
        inverse = torch.where(scales > 0, 1 / scales, torch.zeros_like(scales))
        levels = (grouped * inverse.unsqueeze(2)).round_().to(torch.int8).view(rows, -1)
        if self.bits == 4:
            pairs = (levels + 8).view(torch.uint8).view(rows, -1, 2)
            codes = pairs[..., 0] | pairs[..., 1] << 4
        else:
            codes = levels.view(torch.uint8)
        return torch.cat([codes, scales.contiguous().view(torch.uint8)], dim=1)

    def decode(self, message: Tensor, count: int) -> Tensor:
        """Decode (rows, bytes) uint8 to (rows, count) fp32."""
        rows, groups = len(message), -(-count // self.group)
        split = groups * self.group * self.bits // 8
        codes = message[:, :split]
        scales = message[:, split:].contiguous().view(torch.float32)
        if self.bits == 4:
            levels = torch.stack([codes & 15, codes >> 4], dim=2).to(torch.int8) - 8
        else:
            levels = codes.contiguous().view(torch.int8)
        grouped = levels.reshape(rows, groups, self.group) * scales.unsqueeze(2)
        flat = grouped.view(rows, -1)
        return (turn(flat) if self.rotate else flat)[:, :count]


@functools.lru_cache(maxsize=2)
def hadamard(device: torch.device) -> Tensor:
    """Return the orthogonal, symmetric and thus self-inverse Hadamard matrix (SIDE, SIDE)."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < SIDE:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(SIDE)


def turn(values: Tensor) -> Tensor:
    """Multiply every ``SIDE`` consecutive values of (rows, count) by the Hadamard matrix."""
    return (values.reshape(-1, SIDE) @ hadamard(values.device)).view(values.shape)
