"""The block quantizer of blocks.py as Triton kernels. Importing it requires Triton.

A program processes ``BLOCKS`` blocks of 32 values; at 4 bits the low nibbles hold the first half of
a block. Levels are rounded half up, not half to even. Kernel arguments have no annotations, since
Triton interprets them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 32
#: blocks per program: 8192 values
BLOCKS = 256


def _encode8(values, levels, scales, numel, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    at = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(values + at, mask=at < numel, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(x), axis=1) / 127.0
    inverse = 1.0 / tl.maximum(scale, 1e-30)
    level = tl.floor(x * inverse[:, None] + 0.5)
    tl.store(levels + at, level.to(tl.int8), mask=at < numel)
    tl.store(scales + block, scale, mask=block * 32 < numel)


def _decode8(levels, scales, out, numel, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    at = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    level = tl.load(levels + at, mask=at < numel, other=0).to(tl.float32)
    scale = tl.load(scales + block, mask=block * 32 < numel, other=0.0)
    tl.store(out + at, (level * scale[:, None]).to(out.dtype.element_ty), mask=at < numel)


def _encode4(values, levels, scales, numel, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    at = block[:, None] * 32 + tl.arange(0, 16)[None, :]
    low = tl.load(values + at, mask=at < numel, other=0.0).to(tl.float32)
    high = tl.load(values + at + 16, mask=at + 16 < numel, other=0.0).to(tl.float32)
    top = tl.maximum(tl.max(tl.abs(low), axis=1), tl.max(tl.abs(high), axis=1))
    scale = top / 7.0
    inverse = 1.0 / tl.maximum(scale, 1e-30)
    first = tl.floor(low * inverse[:, None] + 8.5).to(tl.int32)
    second = tl.floor(high * inverse[:, None] + 8.5).to(tl.int32)
    byte = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(levels + byte, (first | (second << 4)).to(tl.uint8), mask=at < numel)
    tl.store(scales + block, scale, mask=block * 32 < numel)


def _decode4(levels, scales, out, numel, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    at = block[:, None] * 32 + tl.arange(0, 16)[None, :]
    byte = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    both = tl.load(levels + byte, mask=at < numel, other=0).to(tl.int32)
    scale = tl.load(scales + block, mask=block * 32 < numel, other=0.0)
    low = ((both & 15) - 8).to(tl.float32) * scale[:, None]
    high = ((both >> 4) - 8).to(tl.float32) * scale[:, None]
    tl.store(out + at, low.to(out.dtype.element_ty), mask=at < numel)
    tl.store(out + at + 16, high.to(out.dtype.element_ty), mask=at + 16 < numel)


_ENCODE = {8: triton.jit(_encode8), 4: triton.jit(_encode4)}
_DECODE = {8: triton.jit(_decode8), 4: triton.jit(_decode4)}


def buffers(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Allocate ``(levels, scales)`` for 1-D ``values``, a multiple of 32."""
    levels = values.new_empty(
        values.numel() * bits // 8, dtype=torch.int8 if bits == 8 else torch.uint8
    )
    return levels, values.new_empty(values.numel() // BLOCK, dtype=torch.float32)


def encode(values: Tensor, levels: Tensor, scales: Tensor, bits: int) -> None:
    """Fill ``levels`` and ``scales``."""
    grid = (triton.cdiv(values.numel(), BLOCK * BLOCKS),)
    _ENCODE[bits][grid](values, levels, scales, values.numel(), COUNT=BLOCKS)


def decode(levels: Tensor, scales: Tensor, out: Tensor, bits: int) -> None:
    """Fill ``out``."""
    grid = (triton.cdiv(out.numel(), BLOCK * BLOCKS),)
    _DECODE[bits][grid](levels, scales, out, out.numel(), COUNT=BLOCKS)
