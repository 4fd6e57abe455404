"""Buckets of ZeRO 0 to 2 on fakes: upstream's divisors, whose gradients, and views of memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hybridcomp.channels import NAME
from hybridcomp.channels.residuals.pieces import Piece
from hybridcomp.codecs import make_codec
from hybridcomp.patches.ds.zero.zero0 import _AveragedBucket, factors, pieces_of
from hybridcomp.patches.ds.zero.zero12 import _flatten, _slice


def engine_of(averages: bool = True, postscales: bool = True) -> Any:
    return SimpleNamespace(
        gradient_average=averages,
        postscale_gradients=lambda: postscales,
        gradient_predivide_factor=lambda: 2.0,
        flatten=lambda bucket: torch.cat([grad.view(-1) for grad in bucket]),
    )


@pytest.mark.parametrize(
    ("averages", "postscales", "expected"),
    [(True, True, (0.5, 0.25)), (True, False, (0.125, 1.0)), (False, True, (1.0, 1.0))],
)
def test_factors_before_and_after_the_sum(
    averages: bool, postscales: bool, expected: tuple[float, float]
) -> None:
    assert factors(engine_of(averages, postscales), 8) == expected


@pytest.mark.parametrize("in_fp32", [True, False])
def test_residuals_have_the_units_of_the_average(in_fp32: bool) -> None:
    """With error feedback all factors precede the codec, or other ranks would misread residuals."""
    grads = [torch.full((3,), 8.0).bfloat16(), torch.ones(1).bfloat16()]
    message = _AveragedBucket(
        numel=4, dtype=torch.bfloat16, group=None, engine=engine_of(), bucket=grads,
        dp_world_size=8, in_fp32=in_fp32,
    )  # fmt: skip
    sent = message.load(make_codec("blockint"))
    assert sent.tolist() == ([1.0] * 3 + [0.125] if in_fp32 else [4.0] * 3 + [0.5])
    assert sent.dtype == (torch.float32 if in_fp32 else torch.bfloat16)
    handle: Any = SimpleNamespace(wait=lambda: None)
    found = message.finish(handle)
    assert found.dtype == torch.bfloat16 and found.tolist() == [1.0] * 3 + [0.125]


def test_parts_of_a_flat_buffer_are_those_of_their_parameters() -> None:
    """A buffer of BF16_Optimizer arrives whole and padded, or, partly frozen, as views."""
    group = [nn.Parameter(torch.ones(numel)) for numel in (3, 2, 2)]
    for name, parameter in zip("abc", group, strict=True):
        setattr(parameter, NAME, name)
    flat = torch.zeros(8)
    optimizer = SimpleNamespace(bf16_groups=[group], fp32_groups_gradients_flat=[flat])
    engine = SimpleNamespace(module=nn.ParameterList(group), optimizer=optimizer)
    whole = [Piece("a", 0, 3), Piece("b", 0, 2), Piece("c", 0, 2), Piece("", 0, 1)]
    assert pieces_of(engine, [flat]) == whole
    assert pieces_of(engine, [flat[3:5], flat[5:7]]) == whole[1:3]


def test_slices_are_a_view_only_of_one_storage() -> None:
    one, other = torch.arange(8.0), torch.arange(8.0) + 100
    near = _flatten([_slice((0, one[2:4])), _slice((1, one[4:8]))])
    assert near.tolist() == one[2:].tolist() and near.data_ptr() == one[2:].data_ptr()
    # the second begins where the first ends, in another tensor
    apart = _flatten([_slice((0, one[2:4])), _slice((1, other[4:8]))])
    assert apart.tolist() == [2.0, 3.0, 104.0, 105.0, 106.0, 107.0]
