"""Slices of a plan in one launch: the bytes and bits of a launch per slice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridcomp.codecs import VALUE_DTYPES, BlockInt
from hybridcomp.errors import CodecError
from hybridcomp.kernels.cuda.fused import MOST_SUMMED, FusedBlockInt
from hybridcomp.kernels.cuda.planned import PlannedBlockInt
from hybridcomp.kernels.stretches import PlannedStretch
from tests.codecs import arrays
from tests.kernels.cuda.common import decoded, payload_of
from tests.kernels.cuda.emulated import EmulatedLauncher, blockint

SETTINGS: list[dict[str, Any]] = [{"bits": 8}, {"bits": 4, "rotate": True}]
#: starts of slices, some unaligned: one value, none, full and partial tiles
STARTS, NUMEL = (0, 1, 1025, 1058, 1058, 6058, 8106), 8123
LENGTHS = (1, 1024, 33, 0, 5000, 2048, 17)


def kernels_of(codec: BlockInt) -> PlannedBlockInt:
    return PlannedBlockInt(EmulatedLauncher(), codec._setting)


def laid_out(codec: BlockInt, order: tuple[int, ...]) -> tuple[list[PlannedStretch], int]:
    """Return slices with payloads in ``order``, and the bytes of these."""
    places, position = {}, 0
    for index in order:
        places[index] = position
        position += codec.wire_nbytes(LENGTHS[index], torch.float32)
    rows = zip(STARTS, LENGTHS, strict=True)
    return [PlannedStretch(a, n, places[i], a + 3) for i, (a, n) in enumerate(rows)], position


ORDER = (3, 5, 0, 1, 6, 2, 4)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
def test_stretches_have_the_payloads_of_single_calls(
    settings: dict[str, Any], dtype: torch.dtype
) -> None:
    codec, values = blockint(settings), arrays.make("outliers", NUMEL, 1, dtype)
    rows, nbytes = laid_out(codec, ORDER)
    planned, sent = kernels_of(codec), torch.full((nbytes,), 0xA5, dtype=torch.uint8)
    out = torch.full((NUMEL + 3,), 3.0)
    table = planned.table(rows)
    planned.encode(table, values, sent)
    planned.decode(table, sent, out)
    for row in rows:
        here = values[row.values : row.values + row.numel]
        right, found = payload_of(codec, here), out[row.out : row.out + row.numel]
        assert torch.equal(sent[row.payload : row.payload + right.numel()], right)
        back = decoded(codec, right, row.numel, torch.float32)
        assert torch.equal(arrays.bits_of(found), back)
    assert out[:3].eq(3.0).all()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("held", [False, True], ids=["apart", "held"])
def test_residuals_keep_what_is_left(settings: dict[str, Any], held: bool) -> None:
    """``held``: the residual already holds the sum of values and residual."""
    codec, values = blockint(settings), arrays.make("normal", NUMEL, 2, torch.bfloat16)
    left = arrays.make("nonfinite", NUMEL, 3) / 100
    left[7:9] = -0.0
    rows, nbytes = laid_out(codec, ORDER)
    total = left.clone() if held else left + values
    sent, planned = torch.zeros(nbytes, dtype=torch.uint8), kernels_of(codec)
    planned.encode(planned.table(rows), None if held else values, sent, left)
    for row in rows:
        here = slice(row.values, row.values + row.numel)
        right = payload_of(codec, total[here])
        assert torch.equal(sent[row.payload : row.payload + right.numel()], right)
        back = decoded(codec, right, row.numel, torch.float32).view(torch.float32)
        kept = (total[here] - back).nan_to_num(0.0, 0.0, 0.0)
        assert torch.equal(arrays.bits_of(kept), arrays.bits_of(left[here]))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("ranks", [2, 9])
def test_sums_are_those_of_single_launches(settings: dict[str, Any], ranks: int) -> None:
    codec, me, launcher = blockint(settings), ranks // 2, EmulatedLauncher()
    rows, slot = laid_out(codec, ORDER)
    own, left = arrays.make("normal", NUMEL, 5, torch.bfloat16), arrays.make("normal", NUMEL, 6)
    planned, fused = kernels_of(codec), FusedBlockInt(launcher, codec._setting)
    sent = torch.empty((ranks - 1) * slot, dtype=torch.uint8)
    for rank, one in enumerate(torch.split(sent, slot)):
        kind = "nonfinite" if rank == 1 else "normal"
        planned.encode(planned.table(rows), arrays.make(kind, NUMEL, rank), one)
    table = planned.table(rows, sums=True)
    for residual in (None, left):
        found, kept = torch.full((NUMEL + 3,), 3.0), None if residual is None else left.clone()
        planned.sum(table, sent, own, ranks, me, found, kept)
        for row in rows:
            here, right = slice(row.values, row.values + row.numel), torch.empty(row.numel)
            size = codec.wire_nbytes(row.numel, torch.float32)
            parts = [one[row.payload : row.payload + size] for one in torch.split(sent, slot)]
            single = None if residual is None else residual[here].clone()
            fused.sum(torch.cat(parts), own[here], ranks, me, right, single)
            mine = found[row.out : row.out + row.numel]
            assert torch.equal(arrays.bits_of(mine), arrays.bits_of(right)), row
            if kept is not None:
                assert not kept[here].any()
        assert found[:3].eq(3.0).all()


def test_nothing_is_launched_for_nothing_and_too_much_is_refused() -> None:
    planned, none = kernels_of(BlockInt(bits=4)), torch.empty(0)
    table = planned.table([PlannedStretch(0, 0, 0)])
    assert (len(table), table.tiles) == (0, 0)
    planned.decode(table, torch.empty(0, dtype=torch.uint8), none)
    with pytest.raises(CodecError, match="reduce in smaller buckets"):
        planned.table([PlannedStretch(0, MOST_SUMMED, 0)], sums=True)


def test_rows_of_sums_begin_at_thread_blocks() -> None:
    planned = kernels_of(BlockInt(bits=4))
    rows = [PlannedStretch(0, 1025, 0), PlannedStretch(2000, 1, 64), PlannedStretch(3000, 3000, 9)]
    assert planned.table(rows).rows[:, 0].tolist() == [0, 2, 3]
    table = planned.table(rows, sums=True)
    assert table.rows[:, 0].tolist() == [0, 2, 4] and table.tiles == 8
