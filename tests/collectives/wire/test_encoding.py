"""Sums of 16-bit values into fp32: what torch adds, by faster kernels."""

from __future__ import annotations

import pytest
import torch

from hybridcomp.collectives.wire.encoding import add_values, settle
from tests.collectives.common import DTYPES, values_of


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal bits, but for the payload of a NaN."""
    bits = first.view(torch.int32) == second.view(torch.int32)
    return bool((bits | (first.isnan() & second.isnan())).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 1003, 65536])
def test_adds_and_settles_as_torch_does(dtype: torch.dtype, numel: int) -> None:
    """Also in the middle of a tensor, at any offset."""
    for offset in (0, 1, 5):
        values = values_of(0, numel + offset, dtype)[offset:]
        total = values_of(1, numel + offset)[offset:]
        values[3::11] = torch.inf
        values[2::13] = torch.nan
        summed, left = total.clone(), total.clone()
        add_values(summed, values)
        assert same(summed, total + values.float())
        settle(left, values)
        expected = (total - values.float()).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        assert same(left, expected)
