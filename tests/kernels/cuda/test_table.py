"""Several tensors in one launch: the bytes and bits of a launch for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybridcomp.codecs import VALUE_DTYPES
from hybridcomp.kernels.cuda import CudaKernels
from hybridcomp.kernels.cuda.table import ROWS
from tests.codecs import arrays
from tests.kernels.cuda.common import decoded, kernels_replaced, payload_of
from tests.kernels.cuda.emulated import EmulatedLauncher, blockint

SETTINGS: list[dict[str, Any]] = [{"bits": 8}, {"bits": 4, "rotate": True}]
#: one value, full and partial tiles, none, more than a thread block holds
LENGTHS = (1, 1024, 33, 0, 5000, 2048, 17)


def pieces(dtype: torch.dtype, lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
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
    codec, launcher = blockint(settings), EmulatedLauncher()
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
        assert torch.equal(payload_of(codec, one), room)
        assert torch.equal(decoded(codec, room, one.numel(), dtype), arrays.bits_of(back))
        codec.decode_add(room, before, dtype)
        assert torch.equal(arrays.bits_of(before), arrays.bits_of(total))
    assert [kernel.split("_")[2] for kernel in launcher.kernels] == ["encode", "decode", "add"]
    assert [rows for rows, _ in launcher.tables] == [6] * 3  # without the empty tensor


def test_residuals_of_a_table() -> None:
    codec, values = blockint({"bits": 4}), pieces(torch.bfloat16, (100, 2000, 31))
    before = [arrays.make("outliers", v.numel(), 9) / 100 for v in values]
    residuals = [r.clone() for r in before]
    sizes = [codec.wire_nbytes(v.numel(), v.dtype) for v in values]
    rooms = list(torch.split(torch.zeros(sum(sizes), dtype=torch.uint8), sizes))
    with kernels_replaced(CudaKernels(EmulatedLauncher())):
        each = codec.each(values[0].device)
        assert each is not None
        each.encode(values, rooms, residuals)
    for one, kept, room, left in zip(values, before, rooms, residuals, strict=True):
        total, sent = kept + one, torch.empty_like(kept)
        codec.decode(room, sent)
        assert torch.equal(payload_of(codec, total), room)
        assert torch.equal((total - sent).nan_to_num(0.0, 0.0, 0.0), left)


def test_more_tensors_than_a_table_has_rows() -> None:
    codec, launcher = blockint({"bits": 8}), EmulatedLauncher()
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
    assert [rows for rows, _ in launcher.tables] == [ROWS, ROWS, 1] * 2
    for one, back in zip(values, out, strict=True):
        right = torch.zeros(40)
        codec.decode(payload_of(codec, one), right)
        assert torch.equal(right, back)
