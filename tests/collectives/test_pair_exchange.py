"""all_reduce between two ranks: one message, one quantization."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hybridcomp.codecs import Bounded, make_codec
from hybridcomp.codecs.base import VALUE_DTYPES, Codec
from hybridcomp.collectives import Meter, all_reduce_codecs, chunk_ranges
from hybridcomp.collectives.wire.chunking import SEGMENT_ALIGN as ALIGN
from tests.collectives.calls import all_reduce
from tests.collectives.common import CODECS, DAY, LOSSY, bound, rank_order_sum, values_of
from tests.selection import by_day
from tests.stand_ins import thread_groups

CPU = torch.device("cpu")
NUMEL = 3 * ALIGN + 777


def summed(
    codec: Codec, dtype: torch.dtype, kept: Sequence[dict[str, Any]] = ({}, {}), **more: Any
) -> tuple[list[Tensor], Meter]:
    """Return the result on both ranks and the bytes of rank 0; ``kept``: arguments per rank."""
    meters = [Meter(), Meter()]

    def one(group: Any, rank: int) -> Tensor:
        tensor = values_of(rank, NUMEL, dtype)
        all_reduce(tensor, codec, group, meter=meters[rank], **kept[rank], **more)
        return tensor

    return thread_groups.run(2, one), meters[0]


@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
@pytest.mark.parametrize("codec", by_day(CODECS, DAY), ids=str)
def test_each_value_is_quantized_once(codec: Codec, dtype: torch.dtype) -> None:
    (first, second), meter = summed(codec, dtype)
    inputs = [values_of(rank, NUMEL, dtype) for rank in range(2)]
    exact = rank_order_sum(inputs)
    assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))
    assert float((first.float() - exact).abs().max()) <= bound(codec, inputs, hops=1)
    assert meter.messages == (1 if codec.fixed_size else 2), "sizes ahead, and the payload"
    if codec.fixed_size:
        assert meter.wire_nbytes == codec.wire_nbytes(NUMEL, dtype)


@pytest.mark.parametrize("codec", LOSSY, ids=str)
def test_the_squared_error_is_smaller_than_in_two_hops(codec: Codec) -> None:
    def squared(found: list[Tensor]) -> float:
        exact = rank_order_sum([values_of(rank, NUMEL) for rank in range(2)])
        return float((found[0] - exact).square().sum())

    once = squared(summed(codec, torch.float32)[0])
    twice = squared(in_two_hops(codec))
    # two hops also encode the sum, within the same absolute bound
    assert 0 < once < (1.05 if getattr(codec, "mode", "") == "abs" else 0.8) * twice


def in_two_hops(codec: Codec) -> list[Tensor]:
    """Return the sum over four ranks, two of which contribute zeros."""

    def one(group: Any, rank: int) -> Tensor:
        tensor = values_of(rank, NUMEL) if rank < 2 else torch.zeros(NUMEL)
        all_reduce(tensor, codec, group)
        return tensor

    return thread_groups.run(4, one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("codec", LOSSY, ids=str)
def test_what_was_given_is_delivered_or_held(codec: Codec, dtype: torch.dtype) -> None:
    residuals = [values_of(rank + 7, NUMEL) for rank in range(2)]
    owners = [torch.ones(stop - start) for start, stop in chunk_ranges(NUMEL, 2)]
    given = rank_order_sum([values_of(rank, NUMEL, dtype) for rank in range(2)] + residuals)
    kept = [
        {"residual": left, "owner_residual": owner}
        for left, owner in zip(residuals, owners, strict=True)
    ]
    found, _ = summed(codec, dtype, kept)
    missing = given - found[0].float() - residuals[0] - residuals[1]
    scale = float(given.abs().max()) * (2.0**-20 + torch.finfo(dtype).eps)
    assert float(missing.abs().max()) <= scale
    assert all(bool((owner == 1).all()) for owner in owners), "no sum is quantized"
    assert all(bool(residual.any()) for residual in residuals)


def test_a_bound_leaves_one_quantization_twice_the_error() -> None:
    codec = Bounded(0.02)
    (once,) = all_reduce_codecs(codec, torch.float32, 2, CPU, ())
    twice = all_reduce_codecs(codec, torch.float32, 3, CPU, ())
    errors = [getattr(each, "error_bound", None) for each in (once, *twice)]
    assert errors[0] == pytest.approx(0.02, rel=1e-4)
    assert errors[1:] == pytest.approx([0.01, 0.01], rel=1e-2)
    found = {}
    for name, chosen in (("pair", codec), ("two hops", Bounded(0.0099))):
        found[name] = summed(chosen, torch.float32)[1].wire_nbytes * 8 / NUMEL
    assert found["pair"] == pytest.approx(found["two hops"] - 1, abs=0.1), "a bit less"


def test_three_launches_of_a_gpu_stay_two_hops() -> None:
    codec = make_codec("blockint", bits=8)
    with mock.patch.object(type(codec), "fused", lambda *_: SimpleNamespace()):
        assert len(all_reduce_codecs(codec, torch.float32, 2, CPU, ())) == 2
        assert len(all_reduce_codecs(codec, torch.float32, 2, CPU, [64])) == 1
    assert len(all_reduce_codecs(codec, torch.float32, 2, CPU, ())) == 1
