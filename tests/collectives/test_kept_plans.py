"""Plans of buckets and shards of one tensor are made once for all messages alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hybridcomp.codecs import make_codec
from hybridcomp.collectives import Meter, OwnedRange, Shards, owner_plan
from hybridcomp.collectives.owner_plan import find_plan
from hybridcomp.errors import CodecError
from tests.collectives.calls import reduce_scatter
from tests.stand_ins import thread_groups


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with thread_groups.in_process():
        yield


RANGES = (OwnedRange(0, 40, (1,)), OwnedRange(40, 40, (0,)), OwnedRange(40, 100, (2, 1)))


def test_a_tuple_of_ranges_is_known_without_a_look_at_it() -> None:
    again = (RANGES[0], *RANGES[1:])
    plan = find_plan(RANGES, 3)
    with mock.patch.object(owner_plan, "plan_of", side_effect=AssertionError):
        assert find_plan(RANGES, 3) is plan
    assert find_plan(again, 3) == plan == find_plan(list(RANGES), 3)
    assert find_plan(RANGES, 4) != plan


def test_only_so_many_tuples_are_kept() -> None:
    owner_plan._KNOWN.clear()
    with mock.patch.object(owner_plan, "MOST_KNOWN", 2):
        every = [(OwnedRange(0, numel, (0,)),) for numel in (1, 2, 3)]
        for ranges in every:
            assert find_plan(ranges, 2).numel == ranges[0].stop
    assert len(owner_plan._KNOWN) == 1


def test_sums_of_a_rank_lie_one_after_the_other() -> None:
    sums = find_plan(RANGES, 3).sums_of(1)
    assert (sums.numel, sums.results) == (64 + 64, [(0, 40), (64, 124)])
    assert sums.place_of(39) == 39 and sums.place_of(50) == 74
    assert find_plan(RANGES, 3).sums_of(0).results == [(0, 0)]


def test_shards_are_those_of_a_split() -> None:
    flat = torch.arange(10.0)
    shards, parts = Shards(flat, 4), torch.split(flat, 4)
    assert len(shards) == 3 and len(Shards(flat[:0], 0)) == 0
    assert all(torch.equal(a, b) for a, b in zip(shards, parts, strict=True))
    assert torch.equal(shards[-1], parts[-1]) and len(shards[1:]) == 2
    with pytest.raises(IndexError):
        shards[3]


@pytest.mark.parametrize("held", [False, True], ids=["plain", "feedback"])
@pytest.mark.parametrize("last", [40, 7])
def test_shards_of_one_tensor_have_the_sums_of_single_ones(held: bool, last: int) -> None:
    numel = 3 * 40 + last

    def both(group: Any, me: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(me)
        flat, found = torch.randn(numel, generator=generator, requires_grad=True), []
        for cut in (lambda x: Shards(x, 40), lambda x: list(torch.split(x, 40))):
            left = torch.linspace(-1, 1, numel)
            meter, kept = Meter(), cut(left) if held else None
            codec = make_codec("blockint", bits=4)
            found.append(
                reduce_scatter(cut(flat), codec, group, meter=meter, residuals=kept).wait()
            )
            found += [left, torch.tensor(meter.wire_nbytes)]
        return found

    for found in thread_groups.run(4, both):
        assert all(torch.equal(a, b) for a, b in zip(found[:3], found[3:], strict=True))


def test_wrong_shards_are_refused() -> None:
    def refused(group: Any, me: int) -> list[str]:
        codec, said = make_codec("bf16"), []
        for flat, left in (
            (torch.zeros(9), None), (torch.zeros(8).double(), None),
            (torch.zeros(8), Shards(torch.zeros(6), 3)),
        ):  # fmt: skip
            with pytest.raises(CodecError) as error:
                reduce_scatter(Shards(flat, 4), codec, group, meter=Meter(), residuals=left)
            said.append(str(error.value))
        return said

    for count, dtype, residual in thread_groups.run(2, refused):
        assert "expected 2 shards" in count and "torch.float64" in dtype
        assert "residuals: expected 8" in residual
