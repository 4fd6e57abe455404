"""All-reduces and buckets with cuts or several owners: constant launches, the CPU's bits."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridcomp.codecs import BlockInt, make_codec
from hybridcomp.codecs.quantized_residual import QuantizedResidual, as_fp32
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
from hybridcomp.kernels.cuda import CudaKernels
from hybridcomp.kernels.cuda.fused import blockint_macros
from tests.codecs import arrays
from tests.kernels.cuda.common import kernels_replaced
from tests.kernels.cuda.emulated import emulated
from tests.kernels.cuda.test_table import Counting
from tests.ranks import RunRanks

NUMEL = 6000
CUTS = [40, 1064, 3000, 3001]
#: cuts at block borders of every chunk's residual, for low-bit residuals
EVEN = [64, 1088, 4032]
Results = list[tuple[list[torch.Tensor], list[str]]]


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


def twice(message: Any, how: Reduction, fused: bool) -> tuple[list[torch.Tensor], list[str]]:
    """Return results of two messages, with residuals and bytes, and the second one's launches."""
    launcher = Counting()
    with kernels_replaced(CudaKernels(launcher)) if fused else nullcontext():
        found = list(message(how))
        launcher.kernels.clear()
        found += message(how)
    left = [as_fp32(one) for one in (how.residual, how.owner_residual) if one is not None]
    names = [kernel.removeprefix("planned_").split()[0] for kernel in launcher.kernels]
    return [*found, *left, torch.tensor([how.meter.wire_nbytes])], names


def reduction(cuts: list[int], bits: int, hops: int, numel: int = NUMEL) -> Reduction:
    rank, world = dist.get_rank(), dist.get_world_size()
    start, stop = chunk_ranges(numel, world)[rank]
    kept = residual_of(bits if hops > 1 else 0, start, stop, 70 + rank)
    left = residual_of(bits, 0, numel, 50 + rank)
    group, codec = Group.of(None), make_codec("blockint", bits=4)
    return Reduction(codec, group, Meter(), cuts, residual=left, owner_residual=kept)


#: dtype, bits of the residuals (0: none), cuts
SUMS = [
    (torch.bfloat16, 0, CUTS), (torch.bfloat16, 32, CUTS),
    (torch.float32, 32, CUTS), (torch.bfloat16, 8, EVEN),
]  # fmt: skip


def every_all_reduce(fused: bool, sums: list[Any] = SUMS) -> Results:
    torch.set_num_threads(1)
    found = []
    for dtype, bits, cuts in sums:
        values = arrays.make("normal", NUMEL, dist.get_rank(), dtype)

        def message(how: Reduction, values: torch.Tensor = values) -> list[torch.Tensor]:
            total = values.clone()
            all_reduce(total, how).wait()
            return [total]

        hops = 1 if dist.get_world_size() == 2 else 2
        found.append(twice(message, reduction(cuts, bits, hops), fused))
    return found


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


def every_bucket(fused: bool) -> Results:
    torch.set_num_threads(1)
    found, hops = [], dist.get_world_size() - 1
    for ranges, cuts in (DIRECT, BALANCED)[hops - 1]:
        assert owner_hops(ranges, NUMEL, Group.of(None)) == hops
        values = arrays.make("normal", NUMEL, dist.get_rank(), torch.bfloat16)
        for bits in (0, 32, 8):

            def message(
                how: Reduction, values: torch.Tensor = values, ranges: list[OwnedRange] = ranges
            ) -> list[torch.Tensor]:
                return reduce_to_owners(values, ranges, how)

            how = reduction(cuts, bits, hops)
            if bits == 8:  # the owner's alone: chunks begin inside blocks of the other one
                how.residual = None
            found.append(twice(message, how, fused))
    return found


@pytest.fixture(autouse=True, scope="module")
def built() -> None:
    macros = blockint_macros(BlockInt(bits=4)._setting)
    for source in ("blockint_table.cu", "blockint.cu", "blockint_sum.cu"):
        emulated(source, *macros)


def compared(on_ranks: RunRanks, ranks: int, job: Any) -> list[list[list[str]]]:
    """Compare both variants; return every rank's launches per message."""
    names = []
    pairs = zip(on_ranks(ranks, job, False), on_ranks(ranks, job, True), strict=True)
    for rank, (right, found) in enumerate(pairs):
        for index, ((expected, _), (fused, _)) in enumerate(zip(right, found, strict=True)):
            same = [torch.equal(a, b) for a, b in zip(expected, fused, strict=True)]
            assert all(same), (rank, index, same)
        names.append([kernels for _, kernels in found])
    return names


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_all_reduce_with_cuts(on_ranks: RunRanks, ranks: int) -> None:
    """Four launches, three between two ranks, for any cuts, ranks and residuals."""
    hops = ("encode", "decode", "sum") if ranks == 2 else ("encode", "sum", "encode", "decode")
    for of_rank in compared(on_ranks, ranks, every_all_reduce):
        for (_, bits, _), names in zip(SUMS, of_rank, strict=True):
            if bits == 8 and ranks == 3:  # chunks begin inside blocks of the residual: fp32
                names.remove("residual_load")
                names.remove("residual_store")
            assert [name.split("_")[0] for name in names] == list(hops), (bits, names)


@pytest.mark.parametrize("ranks", [2, 3])
def test_buckets_with_cuts_and_several_owners(on_ranks: RunRanks, ranks: int) -> None:
    """Two launches a hop; one more for a shared range, or two where this rank sums it."""
    for of_rank in compared(on_ranks, ranks, every_bucket):
        for names in of_rank:
            kinds = [name.split("_")[0] for name in names if not name.startswith("residual")]
            hops = ["encode", "decode", "sum", "sum"]
            if ranks == 3:
                hops = ["encode", "sum", "encode", "decode", "decode"]
            left = iter(hops)
            assert all(kind in left for kind in kinds), names  # some ranks have nothing to do


def test_cuts_inside_of_blocks_of_a_residual(on_ranks: RunRanks) -> None:
    """It is fp32 within the message; payloads have the CPU's bits."""
    case = [(torch.bfloat16, 8, CUTS)]
    pairs = zip(
        on_ranks(3, every_all_reduce, False, case),
        on_ranks(3, every_all_reduce, True, case),
        strict=True,
    )
    for ((right, _),), ((found, _),) in pairs:
        assert torch.equal(right[0], found[0])
