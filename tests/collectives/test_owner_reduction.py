"""reduce_to_owners: both plans, several owners, the choice between the plans."""

from __future__ import annotations

from itertools import groupby

import pytest
import torch
import torch.distributed as dist

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import Meter, OwnedRange, chunk_ranges
from hybridcomp.collectives.owner_plan import plan_of
from hybridcomp.errors import CodecError
from tests.collectives.calls import reduce_to_owners
from tests.collectives.common import CODECS, DAY, DTYPES, bound, digest, rank_order_sum, values_of
from tests.ranks import RunRanks
from tests.selection import by_day

#: a single owner has nearly all (balanced); alternating owners (direct); ranges with several owners
INCAST = [OwnedRange(0, 900, (1,)), OwnedRange(900, 940, (0,)), OwnedRange(940, 1000, (1,))]
SPREAD = [
    OwnedRange(0, 100, (2,)),
    OwnedRange(100, 100, (0,)),
    OwnedRange(100, 350, (2,)),
    OwnedRange(350, 700, (0,)),
    OwnedRange(700, 1000, (1,)),
]
SHARED = [OwnedRange(0, 40, (0, 2)), OwnedRange(40, 990, (1, 3)), OwnedRange(990, 1000, (3,))]
EVERYONE = [OwnedRange(0, 1000, (0, 1, 2))]


def _reduce(codec: Codec, ranges: list[OwnedRange]) -> dict[int, list[str]]:
    """Return the digests of the sums by index of the range."""
    me, ranks = dist.get_rank(), dist.get_world_size()
    digests: dict[int, list[str]] = {}
    for dtype in DTYPES:
        inputs = [values_of(rank, ranges[-1].stop, dtype) for rank in range(ranks)]
        tensor, meter = inputs[me].clone(), Meter()
        sums = reduce_to_owners(tensor, ranges, codec, None, meter=meter)
        assert torch.equal(tensor, inputs[me]), "the bucket belongs to the caller"
        mine = [(index, r) for index, r in enumerate(ranges) if me in r.ranks]
        assert len(sums) == len(mine)
        for total, (index, owned) in zip(sums, mine, strict=True):
            parts = [values[owned.start : owned.stop] for values in inputs]
            exact = rank_order_sum(parts)
            assert total.dtype == torch.float32 and total.shape == exact.shape
            if codec.lossless and plan_of(tuple(ranges), ranks).kind == "balanced":
                # remote sums have travelled as ``dtype``
                assert ((total == exact) | (total == exact.to(dtype).float())).all()
            elif codec.lossless:
                assert torch.equal(total, exact)
            elif total.numel():
                # a balanced plan encodes across ranges, so the bucket's bound applies
                assert float((total - exact).abs().max()) <= bound(codec, inputs, hops=2)
            digests.setdefault(index, []).append(digest(total))
        if codec.fixed_size and plan_of(tuple(ranges), ranks).kind == "direct":
            assert meter.wire_nbytes == _direct_wire(codec, ranges, dtype)
    return digests


def _direct_wire(codec: Codec, ranges: list[OwnedRange], dtype: torch.dtype) -> int:
    """Return closed-form bytes: neighbours with the same owners are one payload to each."""
    total, me = 0, dist.get_rank()
    filled = [r for r in ranges if r.stop > r.start]
    for owners, run in groupby(filled, key=lambda owned: owned.ranks):
        numel = sum(owned.stop - owned.start for owned in run)
        total += codec.wire_nbytes(numel, dtype) * sum(owner != me for owner in owners)
    return total


def _check(on_ranks: RunRanks, ranks: int, codec: Codec, ranges: list[OwnedRange]) -> None:
    results = on_ranks(ranks, _reduce, codec, ranges)
    for index, owned in enumerate(ranges):
        copies = [results[rank][index] for rank in owned.ranks]
        assert all(copy == copies[0] for copy in copies), f"owners of {owned} differ"


@pytest.mark.parametrize("codec", by_day(CODECS, DAY), ids=str)
def test_balanced(on_ranks: RunRanks, codec: Codec) -> None:
    assert plan_of(tuple(INCAST), 4).kind == plan_of(tuple(SHARED), 5).kind == "balanced"
    _check(on_ranks, 4, codec, INCAST)
    _check(on_ranks, 5, codec, SHARED)


@pytest.mark.parametrize("codec", by_day(CODECS, DAY), ids=str)
def test_direct(on_ranks: RunRanks, codec: Codec) -> None:
    assert plan_of(tuple(SPREAD), 3).kind == plan_of(tuple(INCAST), 2).kind == "direct"
    _check(on_ranks, 3, codec, SPREAD)
    _check(on_ranks, 2, codec, INCAST)
    both = [OwnedRange(0, 64, (0, 1)), OwnedRange(64, 1000, (1,))]
    _check(on_ranks, 2, codec, both)
    _check(on_ranks, 3, codec, EVERYONE[:1] + [OwnedRange(1000, 1001, (2,))])
    _check(on_ranks, 1, codec, [OwnedRange(0, 10, (0,)), OwnedRange(10, 30, (0,))])
    _check(on_ranks, 2, codec, [OwnedRange(0, 0, (0,))])


def test_plan_takes_the_smaller_worst_rank() -> None:
    def one_owner(ranks: int) -> str:
        return plan_of((OwnedRange(0, 4096, (0,)),), ranks).kind

    # a sole owner receives W - 1 lengths directly, but less than 2 in the balanced plan
    assert [one_owner(ranks) for ranks in (1, 2)] == ["direct"] * 2
    assert [one_owner(ranks) for ranks in (3, 4, 8)] == ["balanced"] * 3
    even = [OwnedRange(a, b, (rank,)) for rank, (a, b) in enumerate(chunk_ranges(4096, 8))]
    assert plan_of(tuple(even), 8).kind == "direct"
    shifted = [OwnedRange(r.start, r.stop, ((r.ranks[0] + 1) % 8,)) for r in even]
    assert plan_of(tuple(shifted), 8).kind == "direct"
    assert plan_of((), 4).kind == "direct"


@pytest.mark.parametrize("numel", [1, 33, 64, 1000])
def test_two_ranks_are_always_direct(numel: int) -> None:
    owners = [(0,), (1,), (0, 1)]
    for cut in range(0, numel + 1, 7):
        for first in owners:
            for second in owners:
                ranges = [OwnedRange(0, cut, first), OwnedRange(cut, numel, second)]
                assert plan_of(tuple(ranges), 2).kind == "direct"


def _wrong_ranges() -> None:
    codec, tensor = CODECS[0], torch.zeros(64)
    for ranges, said in (
        ([OwnedRange(0, 60, (0,))], "expected to cover 64 elements, found 60"),
        ([OwnedRange(0, 32, (0,)), OwnedRange(40, 64, (1,))], "expected a range from 32"),
        ([OwnedRange(0, 64, ())], "expected distinct group ranks"),
        ([OwnedRange(0, 64, (2,))], "expected distinct group ranks below 2"),
        ([OwnedRange(0, 64, (1, 1))], "expected distinct group ranks"),
    ):
        with pytest.raises(CodecError, match=said):
            reduce_to_owners(tensor, ranges, codec, None)


def test_wrong_ranges_are_refused(on_ranks: RunRanks) -> None:
    on_ranks(2, _wrong_ranges)
