"""A block quantizer in torch, for ``torch.compile``: blocks of 32, one fp32 scale each."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32


def encode(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Encode 1-D ``values``, a multiple of 32, to ``(levels, scales)``: int8, or two per byte."""
    blocks = values.view(-1, BLOCK).float()
    top = 2 ** (bits - 1) - 1
    scales = blocks.abs().amax(dim=1, keepdim=True) / top
    levels = torch.round(blocks / scales.clamp(min=1e-30)).to(torch.int8)
    if bits == 4:
        both = (levels + 8).to(torch.uint8)
        levels = both[:, : BLOCK // 2] | (both[:, BLOCK // 2 :] << 4)
    return levels, scales


def decode(levels: Tensor, scales: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Decode to 1-D values of ``dtype``."""
    if bits == 4:
        levels = torch.cat((levels & 15, levels >> 4), dim=1).to(torch.int8) - 8
    return (levels.float() * scales).to(dtype).view(-1)
