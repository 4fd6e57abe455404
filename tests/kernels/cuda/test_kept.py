"""Low-bit residuals in CUDA kernels: the CPU's payloads, sums and residual bits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.codecs import VALUE_DTYPES, Codec
from hybridcomp.codecs.quantized_residual import QuantizedResidual, Residual, split
from hybridcomp.collectives import Meter, OwnedRange, chunk_ranges
from hybridcomp.kernels.cuda.fused import FusedBlockInt
from hybridcomp.kernels.cuda.planned import PlannedBlockInt
from hybridcomp.kernels.cuda.table import EachBlockInt
from hybridcomp.kernels.stretches import PlannedStretch
from tests.codecs import arrays
from tests.collectives.calls import all_reduce, reduce_scatter, reduce_to_owners
from tests.kernels.cuda.common import kernels_replaced
from tests.kernels.cuda.emulated import (
    KERNELS,
    Compared,
    EmulatedLauncher,
    Step,
    blockint,
    both_ways,
    build_blockint,
    emulated,
    names_of,
)
from tests.kernels.cuda.sources import NIGHTLY
from tests.ranks import RunRanks

FEW = (4, 8, 16)
ALL: list[dict[str, Any]] = [
    *({"bits": bits} for bits in range(2, 9)), {"bits": 4, "levels": "gaussian"},
    {"bits": 4, "levels": "lloyd"},
    *({"bits": bits, "rotate": True} for bits in (2, 3, 4)),
    {"bits": 4, "levels": "gaussian", "rotate": True}, {"bits": 4, "rounding": "random"},
]  # fmt: skip
#: settings and residual bits: all of them in the nightly run, as each needs separate libraries
CASES = list(itertools.product(ALL, FEW)) if NIGHTLY else [({"bits": 4}, 8)]
ENCODED = CASES if NIGHTLY else [*CASES, ({"bits": 4, "rotate": True}, 4)]
DTYPES = VALUE_DTYPES if NIGHTLY else (torch.bfloat16,)


def kept_of(numel: int, bits: int, seed: int) -> QuantizedResidual:
    """Return a nonzero residual of earlier steps."""
    return QuantizedResidual.of(arrays.make("outliers", numel, seed) / 100, bits)


@pytest.mark.parametrize("bits", FEW)
def test_loaded_and_stored(bits: int) -> None:
    for kind, numel in (
        ("outliers", 5000),
        ("nonfinite", 1057),
        ("subnormal", 31),
        ("near max", 64),
    ):
        values = arrays.make(kind, numel, numel)
        kept = QuantizedResidual.of(values, bits)
        with kernels_replaced(KERNELS):
            assert torch.equal(QuantizedResidual.of(values, bits)._data, kept._data)
            again = kept.unpack()
            part = kept[5 : numel - 3].unpack()
        assert torch.equal(arrays.bits_of(again), arrays.bits_of(kept.unpack()))
        assert torch.equal(part, again[5:-3])


@pytest.mark.parametrize(("settings", "bits"), ENCODED, ids=str)
def test_encoded_in_one_pass(settings: dict[str, Any], bits: int) -> None:
    """Also for a view that begins at a block in the middle."""
    codec = blockint(settings)
    kinds = (("normal", 5000), ("nonfinite", 1030), ("sparse", 40), ("near max", 2048))
    for dtype, (kind, numel) in itertools.product(VALUE_DTYPES, kinds):
        values, first = arrays.make(kind, numel, 3, dtype), kept_of(numel + 64, bits, 4)
        nbytes = codec.wire_nbytes(numel, torch.float32)
        right, found = (torch.full((nbytes,), 0xA5, dtype=torch.uint8) for _ in range(2))
        second = first.clone()
        assert codec.encode_kept(values, first[64:], right)
        with kernels_replaced(KERNELS):
            assert codec.encode_kept(values, second[64:], found)
        assert torch.equal(found, right) and torch.equal(second._data, first._data), (dtype, kind)


@pytest.mark.parametrize(("settings", "bits"), CASES, ids=str)
def test_encoded_in_tables(settings: dict[str, Any], bits: int) -> None:
    """Several tensors, and several slices of a tensor, in one launch."""
    codec, launcher = blockint(settings), EmulatedLauncher()
    lengths, starts, numel = (1024, 32, 2112, 7), (0, 1024, 1088, 3200), 3207
    values, first = arrays.make("outliers", numel, 5, torch.bfloat16), kept_of(numel, bits, 6)
    sizes = [codec.wire_nbytes(n, torch.float32) for n in lengths]
    rows = [slice(a, a + n) for a, n in zip(starts, lengths, strict=True)]
    second, third = first.clone(), first.clone()
    right, tables, planned = (torch.zeros(sum(sizes), dtype=torch.uint8) for _ in range(3))
    for row, room in zip(rows, torch.split(right, sizes), strict=True):
        assert codec.encode_kept(values[row], first[row], room)
    each = EachBlockInt(launcher, codec._setting)
    each.encode(
        [values[r] for r in rows], list(torch.split(tables, sizes)), [second[r] for r in rows]
    )
    kernel = PlannedBlockInt(launcher, codec._setting)
    places = itertools.accumulate(sizes[:-1], initial=0)
    stretches = list(map(PlannedStretch, starts, lengths, places))
    kernel.encode(kernel.table(stretches), values, planned, third)
    for payloads, kept in ((tables, second), (planned, third)):
        assert torch.equal(payloads, right) and torch.equal(kept._data, first._data)
    assert launcher.kernels == [
        f"blockint_{table}_encode_feedback_bf16" for table in ("table", "planned")
    ]


@pytest.mark.parametrize(("settings", "bits"), CASES, ids=str)
def test_sums_of_a_plan(settings: dict[str, Any], bits: int) -> None:
    """The sums of a launch per slice, which are compared with the CPU's below."""
    codec, launcher, ranks, me = blockint(settings), EmulatedLauncher(), 3, 1
    lengths, starts, slot = (1024, 2080, 33), (0, 1024, 3104), 0
    rows = []
    for start, numel in zip(starts, lengths, strict=True):
        rows.append(PlannedStretch(start, numel, slot, start))
        slot += codec.wire_nbytes(numel, torch.float32)
    own, first = arrays.make("normal", 3137, 7, torch.float16), kept_of(3137, bits, 8)
    sent = torch.zeros((ranks - 1) * slot, dtype=torch.uint8)
    planned, fused = (
        PlannedBlockInt(launcher, codec._setting),
        FusedBlockInt(launcher, codec._setting),
    )
    for rank, room in enumerate(torch.split(sent, slot)):
        planned.encode(planned.table(rows), arrays.make("normal", 3137, rank), room)
    found, second = torch.zeros(3137), first.clone()
    planned.sum(planned.table(rows, sums=True), sent, own, ranks, me, found, second)
    for row in rows:
        here, right = slice(row.values, row.values + row.numel), torch.empty(row.numel)
        size = codec.wire_nbytes(row.numel, torch.float32)
        parts = [one[row.payload : row.payload + size] for one in torch.split(sent, slot)]
        fused.sum(torch.cat(parts), own[here], ranks, me, right, first[here])
        assert torch.equal(arrays.bits_of(found[here]), arrays.bits_of(right))
    assert torch.equal(second._data, first._data) and not second.unpack().any()


NUMEL = 7001
LENGTHS = [1101, 1101, 1101]
RANGES = {
    "blocks": [OwnedRange(n, min(n + 3200, 7001), (n // 3200,)) for n in (0, 3200, 6400)],
    "balanced": [OwnedRange(0, 7001, (2,))],
    "inside": [OwnedRange(n, min(n + 3001, 7001), (n // 3001,)) for n in (0, 3001, 6002)],
}


class Held:
    """A rank's residuals in the steps of a reduction."""

    def __init__(self, codec: Codec, bits: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        start, stop = chunk_ranges(NUMEL, world)[rank]
        gaps = [length + -length % 32 for length in LENGTHS]
        self.codec, self.rank = codec, rank
        self.first, self.owner = (
            kept_of(NUMEL, bits, 50 + rank),
            kept_of(stop - start, bits, 60 + rank),
        )
        self.shards = kept_of(sum(gaps), bits, 70 + rank)
        for place in range(3):  # the gaps have no residual
            self.shards[sum(gaps[:place]) + LENGTHS[place] : sum(gaps[: place + 1])].zero_()

    def run(self, name: str, values: Tensor) -> list[Tensor]:
        meter = Meter()
        if name == "all_reduce":
            out, first, owner = values.clone(), self.first, self.owner
            held: dict[str, Any] = {"residual": first, "owner_residual": owner}
            all_reduce(out, self.codec, None, meter=meter, **held).wait()
            return [out]
        if name == "reduce_scatter":
            numels = [n for length in LENGTHS for n in (length, -length % 32)]
            left = split(self.shards, numels)[::2]
            shards = torch.split(values[: sum(LENGTHS)], LENGTHS)
            return [reduce_scatter(shards, self.codec, None, meter=meter, residuals=left).wait()]
        whose = self.owner if name == "balanced" else None
        return reduce_to_owners(
            values, RANGES[name], self.codec, None, meter=meter, residual=self.first,
            owner_residual=whose,
        )  # fmt: skip

    def left(self) -> list[Residual]:
        """Return the residuals; where a block ends in a gap, its scale depends on the writer."""
        return [self.first._data, self.owner._data, self.shards]


def compared(
    settings: dict[str, Any], bits: int, kinds: tuple[str, ...]
) -> list[tuple[str, Compared]]:
    """Compare reductions of every name, kind of values and dtype."""
    found, codec = [], blockint(settings)
    names = ("all_reduce", "reduce_scatter", *RANGES)
    for name, kind, dtype in itertools.product(names, kinds, DTYPES):

        def begin(name: str = name, kind: str = kind, dtype: torch.dtype = dtype) -> Step:
            held = Held(codec, bits)

            def step(number: int) -> list[Residual]:
                kind_now = "normal" if number else kind
                values = arrays.make(kind_now, NUMEL, 9 * number + held.rank, dtype)
                return [*held.run(name, values), *held.left()]

            return step

        found.append((name, both_ways(begin)))
    return found


#: launches per step; two more if a run begins inside a block: the residual is fp32 meanwhile
LAUNCHES = {
    "all_reduce": ["encode_feedback", "reduce_feedback", "decode"],
    "reduce_scatter": ["encode_feedback", "sum_feedback"],
    "blocks": ["planned_encode_feedback", "planned_sum_feedback"],
    "inside": ["residual", "planned_encode_feedback", "planned_sum_feedback", "residual"],
}


@pytest.mark.parametrize(("settings", "bits"), CASES, ids=str)
def test_reductions(on_ranks: RunRanks, settings: dict[str, Any], bits: int) -> None:
    emulated("residual.cu", f"HC_KEPT={bits}")
    build_blockint(settings)
    build_blockint(settings, f"HC_KEPT={bits}")
    kinds = ("outliers", "nonfinite", "near max") if NIGHTLY else ("nonfinite",)
    for found in on_ranks(3, compared, settings, bits, kinds):
        for name, (different, kernels) in found:
            # a block of two runs is quantized once here, but after each run on a CPU
            assert name == "inside" or not different, (name, different)
            short = names_of(kernels)
            assert len(short) <= 6 and short == LAUNCHES.get(name, short), (name, kernels)
