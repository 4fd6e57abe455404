"""Reductions in three and two launches: bits and bytes of the unfused ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.codecs import VALUE_DTYPES
from hybridcomp.collectives import Meter, chunk_ranges
from hybridcomp.collectives.fused import adjacent
from hybridcomp.errors import CodecError
from hybridcomp.kernels.cuda.fused import MOST_SUMMED, FusedBlockInt
from tests.codecs import arrays
from tests.collectives.calls import all_gather, all_reduce, all_to_all, reduce_scatter
from tests.kernels.cuda.emulated import (
    Compared,
    EmulatedLauncher,
    Step,
    blockint,
    both_ways,
    build_blockint,
    count_of,
    names_of,
)
from tests.kernels.cuda.sources import NIGHTLY
from tests.ranks import RunRanks

Case = tuple[Any, ...]


def with_dtypes(cases: tuple[Case, ...]) -> list[Case]:
    """Append the dtypes of ``VALUE_DTYPES`` to cases: by day one to each, in turn.

    Builds the kernels of the cases, whose second item are blockint's settings.
    """
    for _, settings, *_ in cases:
        build_blockint(settings, table=False)
    return [
        (*case, dtype)
        for number, case in enumerate(cases)
        for dtype in (VALUE_DTYPES if NIGHTLY else VALUE_DTYPES[number % 3 :][:1])
    ]


def reduced(
    numel: int, settings: dict[str, Any], kind: str, held: tuple[bool, bool], dtype: torch.dtype
) -> Compared:
    """All-reduce twice; ``held``: residuals of the first and of the second encoding."""
    codec, rank = blockint(settings), dist.get_rank()
    start, stop = chunk_ranges(numel, dist.get_world_size())[rank]

    def begin() -> Step:
        first = arrays.make("outliers", numel, 50 + rank) / 100 if held[0] else None
        second = arrays.make("normal", stop - start, 60 + rank) / 100 if held[1] else None
        meter = Meter()

        def step(number: int) -> list[Tensor]:
            values = arrays.make("normal" if number else kind, numel, 10 * number + rank, dtype)
            handle = all_reduce(
                values, codec, None, meter=meter, residual=first, owner_residual=second
            )
            handle.wait()
            kept = [each for each in (first, second) if each is not None]
            return [values, *kept, torch.tensor([meter.wire_nbytes])]

        return step

    return both_ways(begin)


def every(function: Any, cases: list[Case]) -> list[Compared]:
    return [function(*case) for case in cases]


def test_an_all_reduce_takes_three_launches(on_ranks: RunRanks) -> None:
    """Also with residuals, which end equal."""
    none, both = (False, False), (True, True)
    cases = with_dtypes((
        (7000, {"bits": 8}, "normal", none), (7000, {"bits": 4}, "outliers", none),
        (40, {"bits": 4}, "normal", none), (3, {"bits": 8}, "nonfinite", none),
        (5000, {"bits": 8}, "near max", both), (9001, {"bits": 4}, "nonfinite", none),
        (7001, {"bits": 3, "rotate": True}, "outliers", none),
        (7001, {"bits": 4, "levels": "gaussian"}, "normal", none),
        (7001, {"bits": 4, "levels": "lloyd"}, "normal", none),
        (7001, {"bits": 4, "rounding": "random"}, "outliers", none),
        (7001, {"bits": 8}, "normal", both), (7001, {"bits": 4}, "nonfinite", both),
        (7001, {"bits": 4}, "outliers", (True, False)),
        (5001, {"bits": 4}, "normal", (False, True)),
        (40, {"bits": 4}, "normal", both),
        (7001, {"bits": 3, "rotate": True}, "nonfinite", both),
        (7001, {"bits": 4, "levels": "gaussian"}, "normal", both),
        (7001, {"bits": 4, "levels": "lloyd"}, "normal", both),
        (7001, {"bits": 4, "rounding": "random"}, "normal", both),
    ))  # fmt: skip
    for found in on_ranks(3, every, reduced, cases):
        for case, (different, kernels) in zip(cases, found, strict=True):
            assert not different, case
            assert len(kernels) <= 3, kernels
            if case[0] > 1000:
                first, second = case[3]
                encode = "encode_feedback" if first else "encode"
                reduce = "reduce_feedback" if first or second else "reduce"
                assert names_of(kernels) == [encode, reduce, "decode"], case


def scattered(
    lengths: list[int], settings: dict[str, Any], kind: str, held: bool, dtype: torch.dtype
) -> Compared:
    """Reduce-scatter adjacent shards twice."""
    codec, rank, numel = blockint(settings), dist.get_rank(), sum(lengths)

    def begin() -> Step:
        residual = arrays.make("outliers", numel, 50 + rank) / 100
        meter = Meter()

        def step(number: int) -> list[Tensor]:
            values = arrays.make("normal" if number else kind, numel, 10 * number + rank, dtype)
            values[::7] = -0.0
            handle = reduce_scatter(
                torch.split(values, lengths), codec, None, meter=meter,
                residuals=torch.split(residual, lengths) if held else None,
            )  # fmt: skip
            return [handle.wait(), residual, count_of(meter)]

        return step

    return both_ways(begin)


def test_a_reduce_scatter_takes_two_launches(on_ranks: RunRanks) -> None:
    cases = with_dtypes(tuple(
        (*case, held)
        for case in (
            ([2500] * 3, {"bits": 8}, "normal"), ([1025, 1025, 7], {"bits": 4}, "nonfinite"),
            ([2049, 2049, 0], {"bits": 4}, "near max"), ([33, 0, 0], {"bits": 8}, "normal"),
            ([1101] * 3, {"bits": 3, "rotate": True}, "outliers"),
        )
        for held in (False, True)
    ))  # fmt: skip
    for rank, found in enumerate(on_ranks(3, every, scattered, cases)):
        for case, (different, kernels) in zip(cases, found, strict=True):
            assert not different, case
            names = ["encode_feedback", "sum_feedback"] if case[3] else ["encode", "sum"]
            others = any(length for other, length in enumerate(case[0]) if other != rank)
            mine = bool(case[0][rank])
            assert names_of(kernels) == names[:others] + names[1 : 1 + mine], case


def test_which_shards_follow_each_other() -> None:
    flat = torch.arange(100.0)
    for lengths in ([25] * 4, [40, 40, 20, 0], [100, 0, 0, 0]):
        assert torch.equal(adjacent(torch.split(flat, lengths)), flat)  # type: ignore[arg-type]
    part = adjacent(torch.split(flat[10:40], [15, 15]))
    assert part is not None and torch.equal(part, flat[10:40])
    for wrong in ([20, 40, 40], [40, 20, 40], [0, 50, 50], [50, 0, 50]):
        assert adjacent(torch.split(flat, wrong)) is None
    assert adjacent([flat[:50], flat[50:].clone()]) is None
    assert adjacent([flat[:40], flat[50:90]]) is None


def moved(numel: int, settings: dict[str, Any], kind: str, dtype: torch.dtype) -> Compared:
    """All-gather shards, then swap them."""
    codec, rank, world = blockint(settings), dist.get_rank(), dist.get_world_size()
    values = arrays.make(kind, world * numel, rank, dtype)

    def step(number: int) -> list[Tensor]:
        gathered, swapped, meter = torch.full_like(values, 9), torch.full_like(values, 9), Meter()
        all_gather(values[:numel], gathered, codec, None, meter=meter).wait()
        all_to_all(swapped, values, codec, None, meter=meter).wait()
        return [gathered, swapped, count_of(meter)]

    return both_ways(lambda: step, steps=1)


def test_what_is_only_moved_takes_two_launches(on_ranks: RunRanks) -> None:
    cases = with_dtypes((
        (2500, {"bits": 8}, "normal"), (1025, {"bits": 4}, "nonfinite"),
        (33, {"bits": 4, "levels": "gaussian"}, "normal"),
        (1057, {"bits": 4, "levels": "lloyd"}, "normal"),
        (1101, {"bits": 3, "rotate": True}, "outliers"),
    ))  # fmt: skip
    for found in on_ranks(3, every, moved, cases):
        for case, (different, kernels) in zip(cases, found, strict=True):
            assert not different and names_of(kernels) == ["encode", "decode"] * 2, case


def in_parts(dtype: torch.dtype) -> Compared:
    """All-gather a shard with parameter borders; exchange parts of any length, also empty."""
    rank, codec = dist.get_rank(), blockint({"bits": 4})
    table = [[100, 0, 2000], [300, 33, 7], [0, 1025, 64]]
    gives, takes = table[rank], [row[rank] for row in table]
    values, shard = (
        arrays.make("normal", sum(gives), rank, dtype),
        arrays.make("normal", 3500, rank),
    )

    def step(number: int) -> list[Tensor]:
        gathered, out, meter = shard.new_empty(3 * 3500), values.new_full((sum(takes),), 9), Meter()
        cuts = (40, 1064, 3000, 3001)
        all_gather(shard, gathered, codec, None, meter=meter, cuts=cuts).wait()
        all_to_all(out, values, codec, None, meter=meter, in_splits=gives, out_splits=takes).wait()
        return [gathered, out, count_of(meter)]

    return both_ways(lambda: step, steps=1)


def test_parts_of_any_length_take_two_launches(on_ranks: RunRanks) -> None:
    build_blockint({"bits": 4})
    for dtype in VALUE_DTYPES if NIGHTLY else [torch.bfloat16]:
        for different, kernels in on_ranks(3, in_parts, dtype):
            assert not different
            assert names_of(kernels) == ["planned_encode", "planned_decode"] * 2


def test_more_values_than_the_sums_kernels_count_are_refused() -> None:
    launcher = EmulatedLauncher()
    fused = FusedBlockInt(launcher, blockint({"bits": 4})._setting)
    payloads, room = torch.empty(0, dtype=torch.uint8), torch.empty(0)
    own = torch.empty(1).expand(MOST_SUMMED)  # takes no memory
    with pytest.raises(CodecError, match=f"found {MOST_SUMMED}; reduce in smaller buckets"):
        fused.sum(payloads, own, 3, 0, room)
    assert not launcher.kernels
