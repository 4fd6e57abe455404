"""Plans of buckets and shards are created once for equal messages."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor

from hybridcomp import collectives
from hybridcomp.codecs import Codec, make_codec
from hybridcomp.collectives import Group, Meter, OwnedRange, Shards, Transfer
from hybridcomp.collectives.owner_plan import plan_of
from hybridcomp.collectives.wire import exchange_plan, gathers
from hybridcomp.collectives.wire import group as wire_group
from hybridcomp.errors import CodecError
from tests.collectives.calls import all_reduce, reduce_scatter, reduce_to_owners
from tests.collectives.common import values_of
from tests.stand_ins import thread_groups

RANGES = (OwnedRange(0, 40, (1,)), OwnedRange(40, 40, (0,)), OwnedRange(40, 100, (2, 1)))


def test_sums_of_a_rank_lie_one_after_the_other() -> None:
    sums = plan_of(RANGES, 3).sums_of(1)
    assert (sums.numel, sums.results) == (64 + 64, [(0, 40), (64, 124)])
    assert sums.place_of(39) == 39 and sums.place_of(50) == 74
    assert plan_of(RANGES, 3).sums_of(0).results == [(0, 0)]


def test_shards_are_those_of_a_split() -> None:
    flat = torch.arange(10.0)
    shards, parts = Shards(flat, 4), torch.split(flat, 4)
    assert len(shards) == 3 and len(Shards(flat[:0], 0)) == 0
    assert all(torch.equal(a, b) for a, b in zip(shards, parts, strict=True))
    assert torch.equal(shards[-1], parts[-1]) and len(shards[1:]) == 2
    with pytest.raises(IndexError):
        shards[3]


def test_wrong_shards_are_refused() -> None:
    def refused(group: Any, me: int) -> list[str]:
        codec, said = make_codec("bf16"), []
        for flat, left in (
            (torch.zeros(9), None), (torch.zeros(8).double(), None),
            (torch.zeros(8), Shards(torch.zeros(6), 3)),
        ):  # fmt: skip
            with pytest.raises(CodecError) as error:
                reduce_scatter(Shards(flat, 4), codec, group, residuals=left)
            said.append(str(error.value))
        return said

    for count, dtype, residual in thread_groups.run(2, refused):
        assert "expected 2 shards" in count and "torch.float64" in dtype
        assert "residuals: expected 8" in residual


@functools.lru_cache
def _buckets(size: int) -> tuple[tuple[OwnedRange, ...], ...]:
    """Draw ranges that go directly to their owners, and some that use the balanced plan."""
    numel = 40 * size
    direct = (OwnedRange(0, 40, (0,)), OwnedRange(40, numel, tuple(range(size))))
    return direct, (OwnedRange(0, numel, (1,)),)


def _messages(codec: Codec, group: Group, size: int) -> list[Tensor]:
    """Send every message that has a plan over ``group``; return this rank's results."""
    me, numel = group.rank, 40 * size
    values = values_of(me, numel)
    out, total, spread = torch.empty(40 * size), torch.empty(numel), torch.empty(numel)
    meter, parts, same = Meter(), torch.empty(numel), values.clone()
    all_reduce(same, codec, group, meter=meter)
    shard = reduce_scatter(torch.split(values, 40), codec, group, meter=meter).wait()
    sums = [
        one
        for each in _buckets(size)
        for one in reduce_to_owners(values, each, codec, group, meter=meter)
    ]
    via = Transfer(codec, group, meter)
    collectives.all_gather(values[:40], out, via)
    collectives.all_to_all(parts, values, via)
    collectives.broadcast(values if me == 1 else None, spread, 1, via)
    collectives.reduce(values, total if me == 1 else None, 1, via)
    return [same, shard, *sums, out, parts, spread, *([total] if me == 1 else [])]


CODECS_OF_BOTH_KINDS = [("blockint", {"bits": 4}), ("radix", {"error_bound": 1e-2})]


@pytest.mark.parametrize(("name", "settings"), CODECS_OF_BOTH_KINDS)
@pytest.mark.parametrize("size", [2, 3])
def test_a_message_that_comes_again_is_not_planned_again(
    name: str, settings: dict[str, Any], size: int
) -> None:
    codec, plans = make_codec(name, **settings), [dict[Any, Any]() for _ in range(size)]

    def once(member: Any, me: int) -> list[Tensor]:
        group = Group(member, me, size)
        group.plans = plans[me]
        return _messages(codec, group, size)

    first = thread_groups.run(size, once)
    with (
        mock.patch.object(exchange_plan, "ExchangePlan", side_effect=AssertionError),
        mock.patch.object(gathers, "GatherPlan", side_effect=AssertionError),
    ):
        again = thread_groups.run(size, once)
    for left, right in zip(first, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(("name", "settings"), CODECS_OF_BOTH_KINDS)
def test_plans_go_with_their_group(name: str, settings: dict[str, Any]) -> None:
    """It happens at once: the garbage collector would keep a destroyed group's threads."""

    def gone(member: Any, me: int) -> bool:
        group, codec = Group(member, me, 3), make_codec(name, **settings)
        _messages(codec, group, 3)
        assert len(group.plans) == 8, "every message has one"
        plans = [weakref.ref(plan) for plan in group.plans.values()]
        dead = weakref.ref(group)
        del group
        return dead() is None and not any(plan() for plan in plans)

    gc.collect()
    gc.disable()
    try:
        assert all(thread_groups.run(3, gone))
    finally:
        gc.enable()


def test_a_plan_holds_the_codec_that_it_is_found_by() -> None:
    """Otherwise a new codec at the same address would get the old plan."""

    def sums(member: Any, me: int) -> list[list[Tensor]]:
        kept, found = Group(member, me, 3), []
        for bits in (2, 8, 3, 7, 4, 6):
            for group in (kept, Group(member, me, 3)):
                found.append(_messages(make_codec("blockint", bits=bits), group, 3))
        return found

    for found in thread_groups.run(3, sums):
        for with_plans, without in zip(found[::2], found[1::2], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(with_plans, without, strict=True))


def test_a_group_keeps_so_many_plans() -> None:
    group = Group(cast(Any, None), 0, 1)
    with mock.patch.object(wire_group, "MOST_PLANNED", 10):
        for number in range(3):
            group.keep((number,), number, weight=4)
            group.keep((number, "light"), number)
    assert group.plans == {(2,): 2, (2, "light"): 2}, "the first four weigh ten"


def test_a_codec_against_earlier_values_leaves_no_plan() -> None:
    """The plan is for a single message and holds the receivers' reference."""

    def gathered(member: Any, me: int) -> int:
        group, held = Group(member, me, 2), torch.zeros(100, dtype=torch.bfloat16)
        codec, out = make_codec("stepcode").against(held), torch.zeros(200, dtype=torch.bfloat16)
        collectives.all_gather(torch.ones_like(held), out, Transfer(codec, group, Meter()))
        assert bool((out == 1).all())
        return len(group.plans)

    assert thread_groups.run(2, gathered) == [0, 0]
