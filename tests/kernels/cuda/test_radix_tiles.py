"""radix on a GPU, where its kernels take other paths than the CPU's: same bytes and values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridcomp.codecs import VALUE_DTYPES, make_codec
from tests.kernels.cuda.emulated import check
from tests.selection import by_day


def near_powers_of_two(numel: int, dtype: torch.dtype) -> Tensor:
    """Return values near powers of two that rounding to 16 bits may carry across."""
    generator = torch.Generator().manual_seed(0)
    powers = 2.0 ** torch.randint(-8, 3, (numel,), generator=generator)
    signs = torch.randint(0, 2, (numel,), generator=generator) * 2 - 1
    near = 1 - 0.02 * torch.rand(numel, generator=generator)
    return (powers * signs * near).to(dtype)


@pytest.mark.parametrize("dtype", by_day(VALUE_DTYPES, VALUE_DTYPES[:1]), ids=str)
@pytest.mark.parametrize(
    ("bound", "segment"),
    # so coarse or fine that every block is compared; E a multiple of a spacing; one, two and four
    # digits per word; segments that leave threads, or half of a mask's byte, without a block
    [(0.9, 4096), (3e-7, 272), (0.25, 4096), (2**-7, 4096), (1e-2, 64), (1e-2, 208), (1e-3, 4096)],
)
def test_bounds_and_segments(bound: float, segment: int, dtype: torch.dtype) -> None:
    codec = make_codec("radix", error_bound=bound, segment=segment)
    values = near_powers_of_two(min(5003, 17 * segment), dtype)
    check(codec, values)
    third = len(values) // 48 * 16
    values[:third].view(-1, 16)[::3] = 0
    values[-third:] = 0
    check(codec, values)


@pytest.mark.parametrize("dtype", by_day(VALUE_DTYPES, VALUE_DTYPES[:1]), ids=str)
def test_every_class(dtype: torch.dtype) -> None:
    """A block for each largest digit up to 300, and for many beyond."""
    generator = torch.Generator().manual_seed(1)
    tops = torch.cat([torch.arange(1, 300), (2 ** (8 + torch.arange(0, 140) / 10)).long()])
    digits = torch.rand(tops.numel(), 16, generator=generator) * 2 - 1
    digits[:, 3] = 1
    values = (digits * tops[:, None]).flatten().to(dtype)
    for segment in (64, 4096):
        check(make_codec("radix", error_bound=0.4999, segment=segment, mode="abs"), values)
