"""Reductions in three and two launches: bits and bytes of the unfused ones."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybridcomp.codecs import VALUE_DTYPES, BlockInt, Codec, make_codec
from hybridcomp.collectives import Meter, chunk_ranges
from hybridcomp.collectives.fused import adjacent
from hybridcomp.errors import CodecError
from hybridcomp.kernels.cuda import CudaKernels
from hybridcomp.kernels.cuda.fused import MOST_SUMMED, FusedBlockInt, blockint_macros
from tests.codecs import arrays
from tests.collectives.calls import all_gather, all_reduce, all_to_all, reduce_scatter
from tests.kernels.cuda.common import kernels_replaced
from tests.kernels.cuda.emulated import THREADS, EmulatedLauncher, emulated
from tests.kernels.cuda.sources import NIGHTLY
from tests.ranks import RunRanks


class Counting(EmulatedLauncher):
    """Records launches."""

    def __init__(self) -> None:
        self.kernels: list[str] = []

    def launch(
        self, source: str, defines: tuple[str, ...], kernel: str, grid: tuple[int, int],
        *words: int, threads: int = THREADS, table: bytes | None = None,
    ) -> None:  # fmt: skip
        self.kernels.append(kernel.rpartition("_")[0])  # without the dtype
        super().launch(source, defines, kernel, grid, *words, threads=threads, table=table)


def built(macros: tuple[str, ...]) -> None:
    for source in ("blockint.cu", "blockint_sum.cu"):
        emulated(source, *macros)


def some_dtypes(number: int) -> Sequence[torch.dtype]:
    """Return the dtypes of a test's case: by day one, in turn."""
    return VALUE_DTYPES if NIGHTLY else VALUE_DTYPES[number % 3 :][:1]


def compare(
    numel: int, settings: dict[str, Any], kind: str, dtype: torch.dtype
) -> tuple[bool, Any, Any, Any]:
    """Return ``(same bits, unfused wire bytes, fused wire bytes, kernels launched)``."""
    torch.set_num_threads(1)
    codec, rank = make_codec("blockint", **settings), dist.get_rank()
    values = arrays.make(kind, numel, rank, dtype)
    plain, fused = values.clone(), values.clone()
    first, second = Meter(), Meter()
    all_reduce(plain, codec, None, meter=first).wait()
    launcher = Counting()
    with kernels_replaced(CudaKernels(launcher)):
        all_reduce(fused, codec, None, meter=second).wait()
    same = torch.equal(arrays.bits_of(plain), arrays.bits_of(fused))
    return same, first.wire_nbytes, second.wire_nbytes, launcher.kernels


def many(
    cases: list[tuple[int, dict[str, Any], str, torch.dtype]],
) -> list[tuple[bool, Any, Any, Any]]:
    return [compare(*case) for case in cases]


def test_same_bits_and_bytes_with_three_launches(on_ranks: RunRanks) -> None:
    cases: list[tuple[Any, ...]] = [
        (numel, settings, kind, dtype)
        for number, (numel, settings, kind) in enumerate((
            (7000, {"bits": 8}, "normal"), (7000, {"bits": 4}, "outliers"),
            (40, {"bits": 4}, "normal"), (3, {"bits": 8}, "nonfinite"),
            (5000, {"bits": 8}, "near max"), (9001, {"bits": 4}, "nonfinite"),
            (7001, {"bits": 3, "rotate": True}, "outliers"),
            (7001, {"bits": 4, "levels": "gaussian"}, "normal"),
            (7001, {"bits": 4, "levels": "lloyd"}, "normal"),
            (7001, {"bits": 4, "rounding": "random"}, "outliers"),
        ))
        for dtype in some_dtypes(number)
    ]  # fmt: skip
    for macros in {blockint_macros(BlockInt(**case[1])._setting) for case in cases}:
        built(macros)  # once, before the ranks need it
    for found in on_ranks(3, many, cases):
        for case, (same, plain, fused, kernels) in zip(cases, found, strict=True):
            assert same, case
            assert plain == fused, case
            assert len(kernels) <= 3, kernels
            if case[0] > 1000:
                assert [name.split("_")[1] for name in kernels] == ["encode", "reduce", "decode"]


Held = tuple[bool, bool]  # residuals of the first and of the second encoding


def residuals(numel: int, held: Held) -> list[torch.Tensor | None]:
    """Return nonzero residuals of earlier steps."""
    start, stop = chunk_ranges(numel, dist.get_world_size())[dist.get_rank()]
    first = arrays.make("outliers", numel, 50 + dist.get_rank()) / 100
    second = arrays.make("normal", stop - start, 60 + dist.get_rank()) / 100
    return [kept if there else None for kept, there in zip((first, second), held, strict=True)]


def feedback(
    numel: int, settings: dict[str, Any], kind: str, dtype: torch.dtype, held: Held
) -> list[Any]:
    """Return differences after two steps, and the kernels launched in a step."""
    codec, rank, launcher = make_codec("blockint", **settings), dist.get_rank(), Counting()
    plain, fused = residuals(numel, held), residuals(numel, held)
    found: list[Any] = []
    for step in range(2):
        values = arrays.make(kind if step == 0 else "normal", numel, 10 * step + rank, dtype)
        result = values.clone()
        reduce(values, codec, plain)
        launcher.kernels.clear()
        with kernels_replaced(CudaKernels(launcher)):
            reduce(result, codec, fused)
        for index, (right, wrong) in enumerate(
            zip([values, *plain], [result, *fused], strict=True)
        ):
            if right is None or wrong is None:
                continue
            where = (arrays.bits_of(right) != arrays.bits_of(wrong)).nonzero().flatten()
            if len(where):
                found.append((step, index, len(where), int(where[0])))
    return [*found, [kernel.removeprefix("blockint_") for kernel in launcher.kernels]]


def reduce(values: torch.Tensor, codec: Codec, kept: list[torch.Tensor | None]) -> None:
    all_reduce(values, codec, None, meter=Meter(), residual=kept[0], owner_residual=kept[1]).wait()


def many_with_feedback(
    cases: list[tuple[int, dict[str, Any], str, torch.dtype, Held]],
) -> list[list[Any]]:
    torch.set_num_threads(1)
    return [feedback(*case) for case in cases]


def test_error_feedback_takes_three_launches_and_leaves_the_same_residuals(
    on_ranks: RunRanks,
) -> None:
    cases: list[tuple[Any, ...]] = [
        (numel, settings, kind, dtype, held)
        for number, (numel, settings, kind, held) in enumerate((
            (7001, {"bits": 8}, "normal", (True, True)),
            (7001, {"bits": 4}, "nonfinite", (True, True)),
            (7001, {"bits": 4}, "outliers", (True, False)),
            (5000, {"bits": 8}, "near max", (True, True)),
            (5001, {"bits": 4}, "normal", (False, True)),
            (40, {"bits": 4}, "normal", (True, True)),
            (7001, {"bits": 3, "rotate": True}, "nonfinite", (True, True)),
            (7001, {"bits": 4, "levels": "gaussian"}, "normal", (True, True)),
            (7001, {"bits": 4, "levels": "lloyd"}, "normal", (True, True)),
            (7001, {"bits": 4, "rounding": "random"}, "normal", (True, True)),
        ))
        for dtype in some_dtypes(number)
    ]  # fmt: skip
    for macros in {blockint_macros(BlockInt(**case[1])._setting) for case in cases}:
        built(macros)
    for found in on_ranks(3, many_with_feedback, cases):
        for case, (*different, kernels) in zip(cases, found, strict=True):
            assert not different, case
            assert len(kernels) <= 3, kernels
            if case[0] > 1000:
                first = "encode_feedback" if case[4][0] else "encode"
                assert kernels == [first, "reduce_feedback", "decode"], case


def cut(numel: int) -> bool:
    """Encode blocks one by one if they must not cross parameters."""
    codec = make_codec("blockint", bits=4)
    with mock.patch("hybridcomp.collectives.all_reduction.fused_all_reduce") as fused:
        launcher = Counting()
        with kernels_replaced(CudaKernels(launcher)):
            values = arrays.make("normal", numel, dist.get_rank())
            all_reduce(values, codec, None, meter=Meter(), cuts=(numel // 3,)).wait()
    return not fused.called and bool(launcher.kernels)


def scattered(
    lengths: list[int], settings: dict[str, Any], kind: str, dtype: torch.dtype, held: bool
) -> list[Any]:
    """Return differences after two steps from separate shards, and a step's kernels."""
    codec, rank, numel = make_codec("blockint", **settings), dist.get_rank(), sum(lengths)
    start = arrays.make("outliers", numel, 50 + rank) / 100
    plain, fused, launcher = start.clone(), start.clone(), Counting()
    found: list[Any] = []
    for step in range(2):
        values = arrays.make(kind if step == 0 else "normal", numel, 10 * step + rank, dtype)
        values[::7] = -0.0
        sums, meters = [], []
        for residual, kernels in ((plain, None), (fused, CudaKernels(launcher))):
            meters.append(Meter())
            launcher.kernels.clear()
            with kernels_replaced(kernels) if kernels else nullcontext():
                handle = reduce_scatter(
                    torch.split(values, lengths), codec, None, meter=meters[-1],
                    residuals=torch.split(residual, lengths) if held else None,
                )  # fmt: skip
                sums.append(handle.wait())
        first, second = ((m.messages, m.wire_nbytes) for m in meters)
        if first != second:
            found.append((step, first, second))
        for name, (right, wrong) in {"sum": sums, "residual": (plain, fused)}.items():
            differs = arrays.bits_of(right) != arrays.bits_of(wrong)
            # the processor chooses which of two NaNs an addition keeps
            where = (differs & ~(right.isnan() & wrong.isnan())).nonzero().flatten()
            if len(where):
                found.append((step, name, len(where), int(where[0])))
    return [*found, [kernel.removeprefix("blockint_") for kernel in launcher.kernels]]


def many_scattered(cases: list[tuple[list[int], Any, str, torch.dtype, bool]]) -> list[list[Any]]:
    torch.set_num_threads(1)
    return [scattered(*case) for case in cases]


def test_a_reduce_scatter_takes_two_launches(on_ranks: RunRanks) -> None:
    cases: list[tuple[list[int], Any, str, torch.dtype, bool]] = [
        (lengths, settings, kind, dtype, held)
        for number, (lengths, settings, kind) in enumerate((
            ([2500] * 3, {"bits": 8}, "normal"), ([1025, 1025, 7], {"bits": 4}, "nonfinite"),
            ([2049, 2049, 0], {"bits": 4}, "near max"), ([33, 0, 0], {"bits": 8}, "normal"),
            ([1101] * 3, {"bits": 3, "rotate": True}, "outliers"),
        ))
        for dtype in some_dtypes(number)
        for held in (False, True)
    ]  # fmt: skip
    for macros in {blockint_macros(BlockInt(**case[1])._setting) for case in cases}:
        built(macros)
    for rank, found in enumerate(on_ranks(3, many_scattered, cases)):
        for case, (*different, kernels) in zip(cases, found, strict=True):
            assert not different, case
            names = ["encode_feedback", "sum_feedback"] if case[4] else ["encode", "sum"]
            others = any(length for other, length in enumerate(case[0]) if other != rank)
            mine = bool(case[0][rank])
            assert kernels == names[:others] + names[1 : 1 + mine], case


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


def moved(numel: int, settings: dict[str, Any], kind: str, dtype: torch.dtype) -> list[Any]:
    """Return differences from gathering and swapping shards by CPU kernels, and the launches."""
    codec, rank, launcher = make_codec("blockint", **settings), dist.get_rank(), Counting()
    world, found = dist.get_world_size(), list[Any]()
    values = arrays.make(kind, world * numel, rank, dtype)
    for name in ("all_gather", "all_to_all"):
        results, meters, launcher.kernels = [], [Meter(), Meter()], []
        for meter, kernels in zip(meters, (None, CudaKernels(launcher)), strict=True):
            out = torch.full_like(values, 9)
            with kernels_replaced(kernels) if kernels else nullcontext():
                if name == "all_gather":
                    all_gather(values[:numel], out, codec, None, meter=meter).wait()
                else:
                    all_to_all(out, values, codec, None, meter=meter).wait()
            results.append(arrays.bits_of(out))
        first, second = ((m.messages, m.wire_nbytes, m.used) for m in meters)
        if first != second or not torch.equal(*results):
            found.append((name, first, second))
        found.append([kernel.removeprefix("blockint_") for kernel in launcher.kernels])
    return found


def many_moved(cases: list[tuple[int, dict[str, Any], str, torch.dtype]]) -> list[list[Any]]:
    torch.set_num_threads(1)
    return [moved(*case) for case in cases]


def test_what_is_only_moved_takes_two_launches(on_ranks: RunRanks) -> None:
    cases: list[tuple[Any, ...]] = [
        (numel, settings, kind, dtype)
        for number, (numel, settings, kind) in enumerate((
            (2500, {"bits": 8}, "normal"), (1025, {"bits": 4}, "nonfinite"),
            (33, {"bits": 4, "levels": "gaussian"}, "normal"),
            (1057, {"bits": 4, "levels": "lloyd"}, "normal"),
            (1101, {"bits": 3, "rotate": True}, "outliers"),
        ))
        for dtype in some_dtypes(number)
    ]  # fmt: skip
    for macros in {blockint_macros(BlockInt(**case[1])._setting) for case in cases}:
        built(macros)
    for found in on_ranks(3, many_moved, cases):
        for case, launches in zip(cases, found, strict=True):
            assert launches == [["encode", "decode"]] * 2, case


def exchanged(dtype: torch.dtype) -> list[Any]:
    """Exchange parts of any length, also empty; return if bits and bytes agree, and launches."""
    rank, codec, launcher = dist.get_rank(), make_codec("blockint", bits=4), Counting()
    table = [[100, 0, 2000], [300, 33, 7], [0, 1025, 64]]
    gives, takes = table[rank], [row[rank] for row in table]
    values, found, meters = arrays.make("normal", sum(gives), rank, dtype), [], [Meter(), Meter()]
    for meter, kernels in zip(meters, (None, CudaKernels(launcher)), strict=True):
        out = values.new_full((sum(takes),), 9)
        with kernels_replaced(kernels) if kernels else nullcontext():
            all_to_all(
                out, values, codec, None, meter=meter, in_splits=gives, out_splits=takes
            ).wait()
        found.append(arrays.bits_of(out))
    first, second = ((m.messages, m.wire_nbytes, m.used) for m in meters)
    return [torch.equal(*found), first == second, launcher.kernels]


@pytest.mark.nightly
def test_parts_of_any_length_take_two_launches(on_ranks: RunRanks) -> None:
    emulated("blockint_table.cu", "HC_BITS=4")
    for dtype in VALUE_DTYPES:
        launches = ["blockint_planned_encode", "blockint_planned_decode"]
        assert on_ranks(3, exchanged, dtype) == [[True, True, launches]] * 3


def with_cuts(_: None) -> bool:
    """Return whether shards with cuts are treated as whole chunks."""
    with (
        kernels_replaced(CudaKernels(EmulatedLauncher())),
        mock.patch("hybridcomp.collectives.all_gather_all_to_all.fused_all_gather") as fused,
    ):
        out, codec = torch.empty(2 * 64), make_codec("blockint", bits=8)
        all_gather(torch.randn(64), out, codec, None, meter=Meter(), cuts=[32]).wait()
    return fused.called or not bool(out.isfinite().all())


def test_shards_with_cuts_go_step_by_step(on_ranks: RunRanks) -> None:
    assert on_ranks(2, with_cuts, None) == [False, False]


def test_messages_with_cuts_go_step_by_step(on_ranks: RunRanks) -> None:
    assert all(on_ranks(2, cut, 3000))


def test_more_values_than_the_sums_kernels_count_are_refused() -> None:
    launcher = Counting()
    fused = FusedBlockInt(launcher, BlockInt(bits=4)._setting)
    payloads, room = torch.empty(0, dtype=torch.uint8), torch.empty(0)
    own = torch.empty(1).expand(MOST_SUMMED)  # takes no memory
    with pytest.raises(CodecError, match=f"found {MOST_SUMMED}; reduce in smaller buckets"):
        fused.sum(payloads, own, 3, 0, room)
    assert not launcher.kernels
