"""Several tensors in one launch: the bytes and bits of a launch for each."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridcomp.codecs import VALUE_DTYPES, BlockInt, make_codec
from hybridcomp.collectives import Group, Meter, OwnedRange, Reduction, chunk_ranges, owner_hops
from hybridcomp.collectives import reduce_to_owners as collective_to_owners
from hybridcomp.kernels.cuda import CudaKernels
from hybridcomp.kernels.cuda.fused import blockint_macros
from hybridcomp.kernels.cuda.table import ROWS
from tests.codecs import arrays
from tests.collectives.calls import (
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    reduce_to_owners,
)
from tests.kernels.cuda.common import kernels_replaced
from tests.kernels.cuda.emulated import THREADS, EmulatedLauncher, emulated
from tests.ranks import RunRanks

SETTINGS: list[dict[str, Any]] = [{"bits": 8}, {"bits": 4, "rotate": True}]
#: one value, full and partial tiles, none, more than a thread block holds
LENGTHS = (1, 1024, 33, 0, 5000, 2048, 17)


class Counting(EmulatedLauncher):
    """Records launches and their row counts."""

    def __init__(self) -> None:
        self.kernels: list[str] = []

    def launch(
        self, source: str, defines: tuple[str, ...], kernel: str, grid: tuple[int, int],
        *words: int, threads: int = THREADS, table: bytes | None = None,
    ) -> None:  # fmt: skip
        rows = "" if table is None else f" {int.from_bytes(table[:8], 'little')}"
        self.kernels.append(kernel.removeprefix("blockint_") + rows)
        super().launch(source, defines, kernel, grid, *words, threads=threads, table=table)


def pieces(dtype: torch.dtype, lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    """Return arrays of different kinds; every second is unaligned."""
    kinds = ("normal", "nonfinite", "outliers", "near max")
    return [
        torch.cat([torch.zeros(1, dtype=dtype), arrays.make(kinds[i % 4], n, i, dtype)])[1:]
        if i % 2
        else arrays.make(kinds[i % 4], n, i, dtype)
        for i, n in enumerate(lengths)
    ]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
def test_a_table_of_tensors(settings: dict[str, Any], dtype: torch.dtype) -> None:
    codec, launcher = make_codec("blockint", **settings), Counting()
    values = pieces(dtype)
    sizes = [codec.wire_nbytes(v.numel(), dtype) for v in values]
    rooms = list(torch.split(torch.full((sum(sizes),), 0xA5, dtype=torch.uint8), sizes))
    out = [torch.full_like(v, 3.0) for v in values]
    totals = [torch.linspace(-1, 1, v.numel()) for v in values]
    expected = [total.clone() for total in totals]
    with kernels_replaced(CudaKernels(launcher)):
        each = codec.each(values[0].device)
        assert each is not None
        each.encode(values, rooms)
        each.decode(rooms, out)
        each.decode(rooms, totals, add=True)
    for one, room, back, total, before in zip(values, rooms, out, totals, expected, strict=True):
        payload, right = torch.empty_like(room), torch.empty_like(one)
        codec.encode(one, payload)
        assert torch.equal(payload, room)
        codec.decode(payload, right)
        assert torch.equal(arrays.bits_of(right), arrays.bits_of(back))
        codec.decode_add(payload, before, dtype)
        assert torch.equal(arrays.bits_of(before), arrays.bits_of(total))
    names = [kernel.split()[0].split("_")[1] for kernel in launcher.kernels]
    assert names == ["encode", "decode", "add"]
    assert all(kernel.endswith(" 6") for kernel in launcher.kernels)


def test_residuals_of_a_table() -> None:
    codec, values = make_codec("blockint", bits=4), pieces(torch.bfloat16, (100, 2000, 31))
    before = [arrays.make("outliers", v.numel(), 9) / 100 for v in values]
    residuals = [r.clone() for r in before]
    sizes = [codec.wire_nbytes(v.numel(), v.dtype) for v in values]
    rooms = list(torch.split(torch.zeros(sum(sizes), dtype=torch.uint8), sizes))
    with kernels_replaced(CudaKernels(EmulatedLauncher())):
        each = codec.each(values[0].device)
        assert each is not None
        each.encode(values, rooms, residuals)
    for one, kept, room, left in zip(values, before, rooms, residuals, strict=True):
        total, payload, sent = kept + one, torch.empty_like(room), torch.empty_like(kept)
        codec.encode(total, payload)
        codec.decode(payload, sent)
        assert torch.equal(payload, room)
        assert torch.equal((total - sent).nan_to_num(0.0, 0.0, 0.0), left)


def test_more_tensors_than_a_table_has_rows() -> None:
    codec, launcher = make_codec("blockint", bits=8), Counting()
    values = [torch.randn(40) for _ in range(2 * ROWS + 1)]
    rooms = list(torch.zeros(len(values), codec.wire_nbytes(40, torch.float32), dtype=torch.uint8))
    out = [torch.zeros(40) for _ in values]
    with kernels_replaced(CudaKernels(launcher)):
        each = codec.each(values[0].device)
        assert each is not None
        each.encode(values, rooms)
        each.decode(rooms, out)
        each.encode([], [])
        with pytest.raises(ValueError, match="multiple of 16 bytes"):
            each.encode(values[:1], [torch.zeros(100, dtype=torch.uint8)[1:]])
    assert [kernel.split()[1] for kernel in launcher.kernels] == [f"{ROWS}", f"{ROWS}", "1"] * 2
    for one, back in zip(values, out, strict=True):
        right = torch.zeros(40)
        codec.decode(rooms[0].new_tensor(_payload(codec, one)), right)
        assert torch.equal(right, back)


def _payload(codec: Any, values: torch.Tensor) -> list[int]:
    room = torch.zeros(codec.wire_nbytes(values.numel(), values.dtype), dtype=torch.uint8)
    codec.encode(values, room)
    return room.tolist()


CUTS = [40, 1064, 3000, 3001]


def collectives(dtype: torch.dtype, held: bool) -> list[torch.Tensor]:
    """Return results and residuals of collectives with parameter borders."""
    codec, rank, world = make_codec("blockint", bits=4), dist.get_rank(), dist.get_world_size()
    values = arrays.make("normal", 6000, rank, dtype)
    out = torch.empty(world * 3500, dtype=dtype)
    all_gather(values[:3500], out, codec, None, meter=Meter(), cuts=CUTS).wait()
    total, residual = values.clone(), arrays.make("normal", 6000, 50 + rank) / 100
    left = residual if held else None
    all_reduce(total, codec, None, meter=Meter(), residual=left, cuts=CUTS).wait()
    shards = list(torch.split(values, [2400, 2400, 1200][:world]))
    kept = [arrays.make("normal", s.numel(), 60 + rank) / 100 for s in shards] if held else None
    cuts = [[800, 2000], [5], []]
    mine = reduce_scatter(shards, codec, None, meter=Meter(), residuals=kept, cuts=cuts).wait()
    ranges = [
        OwnedRange(0, 2500, (0,)),
        OwnedRange(2500, 2600, (1, 2)),
        OwnedRange(2600, 6000, (2,)),
    ]
    sums = reduce_to_owners(values, ranges, codec, None, meter=Meter(), cuts=CUTS)
    gives = [1900, 2000, 2100]
    takes = [gives[rank]] * world
    moved = values.new_empty(sum(takes))
    all_to_all(moved, values, codec, None, meter=Meter(), in_splits=gives, out_splits=takes).wait()
    return [out, total, residual, mine, *(kept or []), *sums, moved]


def both(dtype: torch.dtype, held: bool) -> tuple[list[int], list[str]]:
    """Return the results that differ between both variants, and the launches."""
    torch.set_num_threads(1)
    right, launcher = collectives(dtype, held), Counting()
    with kernels_replaced(CudaKernels(launcher)):
        found = collectives(dtype, held)
    different = [
        index
        for index, (a, b) in enumerate(zip(right, found, strict=True))
        if not torch.equal(arrays.bits_of(a), arrays.bits_of(b))
    ]
    return different, launcher.kernels


@pytest.mark.parametrize("held", [False, True], ids=["plain", "feedback"])
def test_messages_with_borders_take_few_launches(on_ranks: RunRanks, held: bool) -> None:
    macros = blockint_macros(BlockInt(bits=4)._setting)
    for source in ("blockint_table.cu", "blockint.cu"):
        emulated(source, *macros)
    for different, kernels in on_ranks(3, both, torch.bfloat16, held):
        assert not different, (different, kernels)
        # five slices of the shard, the same for three ranks
        assert kernels[:2] == ["planned_encode_bf16 5", "planned_decode_bf16 5"], kernels
        # two launches a hop per message, two more for shared ranges; shards with gaps one by one
        assert len(kernels) <= (20 if held else 14), kernels


#: ranges of one owner and nearly one, which use the balanced plan, and of alternating owners, also
#: with CUTS
BUCKETS: dict[str, list[OwnedRange]] = {
    "one": [OwnedRange(0, 6000, (2,))],
    "two": [OwnedRange(0, 777, (1,)), OwnedRange(777, 777, (0,)), OwnedRange(777, 6000, (2,))],
    "turns": [OwnedRange(600 * i, 600 * i + 600, (i % 4,)) for i in range(10)],
}
BUCKETS["cut"] = BUCKETS["turns"]


def to_owners(
    dtype: torch.dtype, held: bool, fused: bool, name: str
) -> tuple[list[torch.Tensor], list[str]]:
    """Return sums and residuals of two messages of a bucket, and the second one's launches."""
    torch.set_num_threads(1)
    codec, rank, world = make_codec("blockint", bits=4), dist.get_rank(), dist.get_world_size()
    values, launcher = arrays.make("normal", 6000, rank, dtype), Counting()
    start, stop = chunk_ranges(6000, world)[rank]
    residual = arrays.make("normal", 6000, 50 + rank) / 100 if held else None
    owner = arrays.make("normal", stop - start, 70 + rank) / 100 if held else None
    group = Group.of(None)
    if owner_hops(BUCKETS[name], 6000, group) == 1:
        owner = None
    cuts = CUTS if name == "cut" else ()
    how = Reduction(codec, group, Meter(), cuts, residual=residual, owner_residual=owner)
    with kernels_replaced(CudaKernels(launcher)) if fused else nullcontext():
        before = collective_to_owners(values, BUCKETS[name], how)
        launcher.kernels.clear()
        sums = [*before, *collective_to_owners(values, BUCKETS[name], how)]
    found = [*sums, *(left for left in (residual, owner) if left is not None)]
    return [*found, torch.tensor([how.meter.wire_nbytes])], launcher.kernels


def all_buckets(dtype: torch.dtype, fused: bool) -> list[tuple[list[torch.Tensor], list[str]]]:
    """Run ``to_owners`` for each bucket, without and with residuals."""
    return [to_owners(dtype, held, fused, name) for name in BUCKETS for held in (False, True)]


def test_buckets_take_two_launches_a_hop(on_ranks: RunRanks) -> None:
    """Some ranks have nothing to do in some; bits, residuals and bytes equal the CPU's."""
    macros = blockint_macros(BlockInt(bits=4)._setting)
    for source in ("blockint_table.cu", "blockint.cu", "blockint_sum.cu"):
        emulated(source, *macros)
    right = on_ranks(4, all_buckets, torch.bfloat16, False)
    for expected, found in zip(right, on_ranks(4, all_buckets, torch.bfloat16, True), strict=True):
        for index, ((sums, _), (fused, kernels)) in enumerate(zip(expected, found, strict=True)):
            feedback, held = ("_feedback", "_held") if index % 2 else ("", "")
            assert all(torch.equal(a, b) for a, b in zip(sums, fused, strict=True))
            wanted = [f"planned_encode{feedback}_bf16", f"planned_sum{feedback}_bf16"]
            if index < 4:  # balanced
                wanted = [f"encode{feedback}_bf16", f"sum{feedback}_bf16"]
                names = {kernel.split()[0] for kernel in kernels[2:]}
                assert names <= {f"planned_encode{held}_fp32", "planned_decode_fp32"}
            assert [kernel.split()[0] for kernel in kernels[:2]] == wanted, kernels
            assert len(kernels) <= 4, kernels
