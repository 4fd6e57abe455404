"""Error feedback: given values equal delivered values plus residuals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.blockint import BlockInt
from hybridcomp.codecs.quantized_residual import Residual, as_fp32, split, zeros
from hybridcomp.collectives import OwnedRange, chunk_ranges
from tests.collectives.calls import all_reduce, reduce_scatter, reduce_to_owners
from tests.collectives.common import CODECS, DAY, DTYPES, values_of
from tests.ranks import RunRanks
from tests.selection import by_day

NUMEL, STEPS = 1000, 3
LIKE = torch.device("cpu")
Array = npt.NDArray[np.float64]
#: given, delivered and residual values of a rank, and the rounding of low-bit residuals at most
Balance = tuple[Array, Array, Array, Array]
#: one reduction: (values, codec, residual, owner residual) -> this rank's result
Reduce = Callable[[Tensor, Codec, Residual, Residual], Tensor]
LENGTHS = [600, 0, 400]
RANGES = [OwnedRange(0, 30, (1,)), OwnedRange(30, 980, (0, 2)), OwnedRange(980, 1000, (0,))]
DIRECT = [OwnedRange(0, 300, (1,)), OwnedRange(300, 700, (0,)), OwnedRange(700, 1000, (2,))]


def by_all_reduce(values: Tensor, codec: Codec, residual: Residual, owner: Residual) -> Tensor:
    tensor = values.clone()
    all_reduce(tensor, codec, None, residual=residual, owner_residual=owner)
    start, stop = chunk_ranges(NUMEL, dist.get_world_size())[dist.get_rank()]
    mine = torch.zeros(NUMEL)
    mine[start:stop] = tensor[start:stop].float()  # count each element on one rank
    return mine


def by_reduce_scatter(values: Tensor, codec: Codec, residual: Residual, owner: Residual) -> Tensor:
    me = dist.get_rank()
    shards, residuals = torch.split(values, LENGTHS), split(residual, LENGTHS)
    total = reduce_scatter(shards, codec, None, residuals=residuals).wait()
    mine = torch.zeros(NUMEL)
    mine[sum(LENGTHS[:me]) : sum(LENGTHS[: me + 1])] = total
    return mine


def _to_owners(ranges: list[OwnedRange], values: Tensor, codec: Codec, *both: Residual) -> Tensor:
    me = dist.get_rank()
    sums = reduce_to_owners(values, ranges, codec, None, residual=both[0], owner_residual=both[1])
    mine = torch.zeros(NUMEL)
    for total, owned in zip(sums, [r for r in ranges if me in r.ranks], strict=True):
        if owned.ranks[0] == me:
            mine[owned.start : owned.stop] = total
    return mine


def by_balanced(values: Tensor, codec: Codec, residual: Residual, owner: Residual) -> Tensor:
    return _to_owners(RANGES, values, codec, residual, owner)


def by_direct(values: Tensor, codec: Codec, residual: Residual, owner: Residual) -> Tensor:
    return _to_owners(DIRECT, values, codec, residual, owner)


def _steps(reduce: Reduce, codec: Codec, dtype: torch.dtype, bits: int = 32) -> Balance:
    me, ranks = dist.get_rank(), dist.get_world_size()
    start, stop = chunk_ranges(NUMEL, ranks)[me]
    kept = zeros(bits, NUMEL, LIKE), zeros(bits, stop - start, LIKE)
    given, delivered, held, most = (np.zeros(NUMEL) for _ in range(4))
    for step in range(STEPS):
        values = values_of(me, NUMEL, dtype, seed=step)
        given += values.double().numpy()
        delivered += reduce(values, codec, *kept).double().numpy()
        for one, here in zip(kept, (slice(0, NUMEL), slice(start, stop)), strict=True):
            most[here] += _half_steps(as_fp32(one), bits)
    for one, here in zip(kept, (slice(0, NUMEL), slice(start, stop)), strict=True):
        held[here] += as_fp32(one).double().numpy()
    return given, delivered, held, most


def _half_steps(values: Tensor, bits: int) -> Array:
    """Return by value half a step of its block of 32: the largest value has the highest level."""
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % 32)).view(-1, 32)
    steps = blocks.abs().amax(1).double() / (2 ** (bits - 1) - 1)
    found: Array = (0.5001 * steps.repeat_interleave(32)[: values.numel()]).numpy()
    return found


@pytest.mark.parametrize("codec", by_day(CODECS, DAY), ids=str)
@pytest.mark.parametrize("reduce", [by_all_reduce, by_reduce_scatter, by_balanced, by_direct])
def test_nothing_is_lost(on_ranks: RunRanks, reduce: Reduce, codec: Codec) -> None:
    for dtype in DTYPES:
        balances = on_ranks(3, _steps, reduce, codec, dtype)
        given, delivered, held, _ = (np.sum(part, axis=0) for part in zip(*balances, strict=True))
        scale = np.abs(given).max() + np.abs(delivered).max()
        assert np.abs(given - delivered - held).max() <= 2e-6 * scale
        # the second hop of a lossy codec encodes fp32 sums, of a lossless one sums rounded to
        # ``dtype``
        second = reduce is by_all_reduce or reduce is by_balanced
        first = codec.element_bound(1.0, dtype) > 0
        if first or second and (not codec.lossless or dtype != torch.float32):
            assert np.abs(held).max() > 0, "a lossy encoding must leave something"
        else:
            assert not held.any()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("reduce", [by_all_reduce, by_reduce_scatter, by_balanced, by_direct])
def test_few_bits_lose_half_a_step_at_most(on_ranks: RunRanks, reduce: Reduce, bits: int) -> None:
    """``original == sent + residual`` up to half a step per message and rank.

    A part that ends inside a block quantizes its neighbours there again.
    """
    again = 1 if reduce is by_all_reduce else 3
    for codec in (BlockInt(4), BlockInt(3, rotate=True), CODECS[0]):
        balances = on_ranks(3, _steps, reduce, codec, torch.bfloat16, bits)
        given, delivered, held, most = (np.sum(p, axis=0) for p in zip(*balances, strict=True))
        lost, fp32 = np.abs(given - delivered - held), 2e-6 * np.abs(given).max()
        assert (lost <= again * most + fp32).all(), codec
        assert codec.lossless or np.abs(held).max() > 0


def _overflow(reduce: Reduce, codec: Codec) -> None:
    me, ranks = dist.get_rank(), dist.get_world_size()
    start, stop = chunk_ranges(NUMEL, ranks)[me]
    for place in (0, 500, 999):
        for bad in (float("nan"), float("inf")):
            residual, owner = torch.zeros(NUMEL), torch.zeros(stop - start)
            values = values_of(me, NUMEL)
            if me == 1:
                values[place] = bad
            seen = torch.isfinite(reduce(values, codec, residual, owner)[place])
            blind = torch.tensor([int(seen)])
            dist.all_reduce(blind)
            assert int(blind) == ranks - 1, "one rank holds the element in its result"
            assert torch.isfinite(residual).all() and torch.isfinite(owner).all()
            again = reduce(values_of(me, NUMEL, seed=1), codec, residual, owner)
            assert torch.isfinite(again).all()


@pytest.mark.parametrize("codec", by_day(CODECS, DAY), ids=str)
@pytest.mark.parametrize("reduce", [by_all_reduce, by_reduce_scatter, by_balanced, by_direct])
def test_an_overflow_does_not_poison(on_ranks: RunRanks, reduce: Reduce, codec: Codec) -> None:
    on_ranks(3, _overflow, reduce, codec)


def _exact_places(codec: Codec) -> None:
    """Values that are never quantized leave no residual, and add the old one."""
    me, ranks = dist.get_rank(), dist.get_world_size()
    start, stop = chunk_ranges(NUMEL, ranks)[me]
    residual = torch.ones(NUMEL)
    all_reduce(values_of(me, NUMEL), codec, None, residual=residual)
    assert not residual[start:stop].any()
    residual[start:stop] = 1.0
    shards = [torch.zeros(b - a) for a, b in chunk_ranges(NUMEL, ranks)]
    residuals = [torch.full_like(shard, 2.0) for shard in shards]
    total = reduce_scatter(shards, codec, None, residuals=residuals).wait()
    assert torch.allclose(total, torch.full_like(total, 2.0 * ranks), rtol=0.2)
    assert not residuals[me].any()
    assert all(not shard.any() for shard in shards), "the shards belong to the caller"


def test_own_chunk_keeps_no_residual(on_ranks: RunRanks) -> None:
    for codec in DAY:
        on_ranks(3, _exact_places, codec)
