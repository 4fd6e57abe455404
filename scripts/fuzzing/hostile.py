"""Generate seeded values that are likely to break a codec's bound, for blocks of every kind."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

NUMEL = 1 << 19
KINDS = 11


def hostile(generator: torch.Generator, choose: random.Random, dtype: torch.dtype) -> Tensor:
    """Return NUMEL values of ``dtype``, shape ``(NUMEL,)``, of one of KINDS kinds."""
    info = torch.finfo(dtype)
    kind = choose.randrange(KINDS)
    if kind in (3, 9, 10):
        return _bits(generator, choose, dtype, kind)
    values = torch.randn(NUMEL, generator=generator)
    largest = math.log2(info.max) - 6
    least = math.log2(info.smallest_normal) - (10 if dtype == torch.float16 else 7)
    if kind == 0:  # the same power of two for all
        values *= 2.0 ** choose.uniform(max(least, -126), largest)
    elif kind == 1:  # a different power of two every 16 values
        powers = torch.empty(NUMEL // 16).uniform_(-14, 0, generator=generator).exp()
        values *= powers.repeat_interleave(16) * 2.0 ** choose.randint(-24, 4)
    elif kind == 2:  # an outlier in every segment
        values[:: choose.choice([61, 997, 4096])] *= 2.0 ** choose.randint(5, 14)
    elif kind == 4:  # the smallest subnormals, with occasional normal values
        steps = torch.randint(-1023, 1024, (NUMEL,), generator=generator).double()
        tiny = steps * (info.smallest_normal * info.eps)
        tiny[:: choose.choice([3000, 10**9])] = info.smallest_normal * choose.uniform(0, 8)
        return tiny.to(dtype)
    elif kind == 5:  # on the edges of levels
        levels = choose.choice([1, 3, 7, 15, 31, 63, 127])
        edges = torch.randint(-2 * levels, 2 * levels + 1, (NUMEL,), generator=generator) / 2
        values = edges / levels * 2.0 ** choose.randint(-20, 12) * (1 + choose.choice([0, 2**-23]))
    elif kind == 6:  # near the largest value
        values = torch.empty(NUMEL).uniform_(-1, 1, generator=generator) * info.max
    elif kind == 7:  # mostly zeros
        values *= torch.rand(NUMEL, generator=generator) < 0.02
    else:
        values[torch.randint(NUMEL, (50,), generator=generator)] = float("nan")
        values[torch.randint(NUMEL, (50,), generator=generator)] = float("inf")
    return values.to(dtype)


def _bits(
    generator: torch.Generator, choose: random.Random, dtype: torch.dtype, kind: int
) -> Tensor:
    """Return random bits (3), subnormals (9), or mantissas with a few close exponents (10)."""
    wide = dtype == torch.float32
    whole = torch.int32 if wide else torch.int16
    bits = torch.randint(-(2**31), 2**31, (NUMEL,), generator=generator, dtype=torch.int64)
    if kind != 3:
        mantissa = round(-math.log2(torch.finfo(dtype).eps))
        sign = 1 << (31 if wide else 15)
        exponents = (sign - 1) >> mantissa
        first, count = (0, 1) if kind == 9 else (choose.randrange(exponents - 4), 4)
        field = torch.randint(first, first + count, (NUMEL,), generator=generator)
        bits = (bits & (sign | (1 << mantissa) - 1)) | field << mantissa
        bits = torch.where(bits >= sign, bits - 2 * sign, bits)
    return bits.to(whole).view(dtype)


def subnormals(values: Tensor) -> int:
    """Count the subnormals among ``values``."""
    size = values.abs()
    return int(((size < torch.finfo(values.dtype).smallest_normal) & (size > 0)).sum())


def by_block(values: Tensor, numel: int, block: int) -> Tensor:
    """Split into messages of ``numel`` values, and each message into blocks, the last 0-padded.

    Returns shape ``(len(values) // numel, blocks, block)``.
    """
    rows = values.view(-1, numel)
    return torch.nn.functional.pad(rows, (0, -numel % block)).view(len(rows), -1, block)


def spread(of_block: Tensor, numel: int, block: int) -> Tensor:
    """Repeat a block's figure for each of its values: the inverse of ``by_block``."""
    return of_block.repeat_interleave(block, 1)[:, :numel].reshape(-1)


def absmax_of(values: Tensor, numel: int, block: int) -> Tensor:
    """Return the largest finite magnitude of each block, float64, shape ``(messages, blocks)``."""
    size = values.float().abs()
    finite = torch.where(size.isfinite(), size, 0.0)
    return by_block(finite, numel, block).amax(2).double()


def spoilt_by(values: Tensor, numel: int, block: int) -> Tensor | None:
    """Mark values whose block contains NaN or Inf, bool; None if there are none."""
    bad = ~values.isfinite()
    if not bool(bad.any()):
        return None
    return bad if block == 1 else spread(by_block(bad, numel, block).any(2), numel, block)
