"""All-reduces and buckets with cuts or several owners: constant launches, the CPU's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.codecs.quantized_residual import QuantizedResidual, Residual
from hybridcomp.collectives import (
    Group,
    Meter,
    OwnedRange,
    Reduction,
    all_reduce,
    chunk_ranges,
    owner_hops,
    reduce_to_owners,
)
from tests.codecs import arrays
from tests.kernels.cuda.emulated import (
    Compared,
    Step,
    blockint,
    both_ways,
    build_blockint,
    count_of,
)
from tests.ranks import RunRanks

NUMEL = 6000
CUTS = [40, 1064, 3000, 3001]
#: cuts at block borders of every chunk's residual, for low-bit residuals
EVEN = [64, 1088, 4032]


def residual_of(bits: int, start: int, stop: int, seed: int) -> Any:
    """Return a residual of ``bits`` bits (0: none) with the same values in every variant."""
    if not bits:
        return None
    values = arrays.make("normal", stop - start, seed) / 100
    if bits == 32:
        return values
    few = QuantizedResidual(bits, stop - start, values.device)
    few.pack(values)
    return few


def twice(
    message: Callable[[Reduction], list[Tensor]],
    cuts: list[int],
    first: int,
    second: int,
    numel: int = NUMEL,
) -> Compared:
    """Send a message twice; ``first``, ``second``: bits of its residuals, 0 for none."""
    rank, world = dist.get_rank(), dist.get_world_size()
    start, stop = chunk_ranges(numel, world)[rank]

    def begin() -> Step:
        how = Reduction(
            blockint({"bits": 4}), Group.of(None), Meter(), cuts,
            residual=residual_of(first, 0, numel, 50 + rank),
            owner_residual=residual_of(second, start, stop, 70 + rank),
        )  # fmt: skip

        def step(number: int) -> list[Residual]:
            found = message(how)
            left = [one for one in (how.residual, how.owner_residual) if one is not None]
            return [*found, *left, count_of(how.meter)]

        return step

    return both_ways(begin)


#: dtype, bits of the residuals (0: none), cuts
SUMS = [
    (torch.bfloat16, 0, CUTS), (torch.bfloat16, 32, CUTS),
    (torch.float32, 32, CUTS), (torch.bfloat16, 8, EVEN),
]  # fmt: skip


def every_all_reduce(sums: list[Any]) -> list[Compared]:
    found = []
    for dtype, bits, cuts in sums:
        values = arrays.make("normal", NUMEL, dist.get_rank(), dtype)

        def message(how: Reduction, values: Tensor = values) -> list[Tensor]:
            total = values.clone()
            all_reduce(total, how).wait()
            return [total]

        found.append(twice(message, cuts, bits, 0 if dist.get_world_size() == 2 else bits))
    return found


def to_owners(ranges: list[OwnedRange], cuts: list[int], first: int, second: int) -> Compared:
    values = arrays.make("normal", NUMEL, dist.get_rank(), torch.bfloat16)
    hops = owner_hops(ranges, NUMEL, Group.of(None))
    return twice(
        lambda how: list(reduce_to_owners(values, ranges, how)), cuts, first, second * (hops > 1)
    )


#: between two ranks in one hop: owners are both, alternating or one; then in two hops
SHARED = [OwnedRange(600 * i, 600 * i + 600, ((0, 1), (i % 2,))[i % 3 == 0]) for i in range(10)]
Bucket = tuple[list[OwnedRange], list[int]]
DIRECT: list[Bucket] = [([OwnedRange(0, NUMEL, (0, 1))], []), (SHARED, []), (SHARED, CUTS)]
BALANCED: list[Bucket] = [
    ([OwnedRange(0, NUMEL, (2,))], CUTS),
    ([OwnedRange(0, 5000, (1, 2)), OwnedRange(5000, NUMEL, (1,))], CUTS),
    ([OwnedRange(0, 900, (0, 1, 2)), OwnedRange(900, NUMEL, (1,))], []),
    ([OwnedRange(600 * i, 600 * i + 600, (i % 3, (i + 1) % 3)) for i in range(10)], CUTS),
]
#: ranges of one owner and nearly one, which use the balanced plan, and of alternating owners
TURNS = [OwnedRange(600 * i, 600 * i + 600, (i % 4,)) for i in range(10)]
OF_FOUR: list[Bucket] = [
    ([OwnedRange(0, 6000, (2,))], []),
    ([OwnedRange(0, 777, (1,)), OwnedRange(777, 777, (0,)), OwnedRange(777, 6000, (2,))], []),
    (TURNS, []), (TURNS, CUTS),
]  # fmt: skip


def every_bucket() -> list[Compared]:
    """Reduce the buckets of this many ranks, with residuals of different bits."""
    world = dist.get_world_size()
    if world == 4:
        return [to_owners(*bucket, bits, bits) for bucket in OF_FOUR for bits in (0, 32)]
    buckets = (DIRECT, BALANCED)[world - 2]
    assert all(owner_hops(ranges, NUMEL, Group.of(None)) == world - 1 for ranges, _ in buckets)
    # of 8 bits the owner's alone: chunks begin inside blocks of the other one
    bits = ((0, 0), (32, 32), (0, 8))
    return [to_owners(*bucket, *both) for bucket in buckets for both in bits]


def kind_of(kernel: str) -> str:
    return kernel.removeprefix("planned_").split("_")[0]


@pytest.fixture(autouse=True, scope="module")
def built() -> None:
    build_blockint({"bits": 4})


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_all_reduce_with_cuts(on_ranks: RunRanks, ranks: int) -> None:
    """Four launches, three between two ranks, for any cuts, ranks and residuals."""
    hops = ("encode", "decode", "sum") if ranks == 2 else ("encode", "sum", "encode", "decode")
    for of_rank in on_ranks(ranks, every_all_reduce, SUMS):
        for (_, bits, _), (different, names) in zip(SUMS, of_rank, strict=True):
            assert not different, (bits, different)
            if bits == 8 and ranks == 3:  # chunks begin inside blocks of the residual: fp32
                names.remove("residual_load")
                names.remove("residual_store")
            assert list(map(kind_of, names)) == list(hops), (bits, names)


@pytest.mark.parametrize("ranks", [2, 3])
def test_buckets_with_cuts_and_several_owners(on_ranks: RunRanks, ranks: int) -> None:
    """Two launches a hop; one more for a shared range, or two where this rank sums it."""
    for of_rank in on_ranks(ranks, every_bucket):
        for different, names in of_rank:
            assert not different, different
            kinds = [kind_of(name) for name in names if not name.startswith("residual")]
            hops = ["encode", "decode", "sum", "sum"]
            if ranks == 3:
                hops = ["encode", "sum", "encode", "decode", "decode"]
            left = iter(hops)
            assert all(kind in left for kind in kinds), names  # some ranks have nothing to do


def test_buckets_take_two_launches_a_hop(on_ranks: RunRanks) -> None:
    """Without and with residuals; some ranks have nothing to do in some."""
    for of_rank in on_ranks(4, every_bucket):
        for index, (different, names) in enumerate(of_rank):
            assert not different, (index, different)
            feedback, held = ("_feedback", "_held") if index % 2 else ("", "")
            wanted = [f"planned_encode{feedback}_bf16", f"planned_sum{feedback}_bf16"]
            if index < 4:  # balanced
                wanted = [f"encode{feedback}_bf16", f"sum{feedback}_bf16"]
                assert {*names[2:]} <= {f"planned_encode{held}_fp32", "planned_decode_fp32"}
            assert names[:2] == wanted and len(names) <= 4, names


def test_cuts_inside_of_blocks_of_a_residual(on_ranks: RunRanks) -> None:
    """It is fp32 within the message; payloads have the CPU's bits."""
    for ((different, _),) in on_ranks(3, every_all_reduce, [(torch.bfloat16, 8, CUTS)]):
        assert (0, 0) not in different
