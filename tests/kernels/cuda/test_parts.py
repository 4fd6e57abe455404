"""Slices of a tensor in one launch, few and many: the bytes and bits of a launch per slice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hybridcomp.codecs import VALUE_DTYPES
from hybridcomp.kernels.cuda import CudaKernels
from hybridcomp.kernels.cuda.planned import PlannedBlockInt
from hybridcomp.kernels.stretches import NEAR, StretchTable
from tests.codecs import arrays
from tests.kernels.cuda.common import decoded, kernels_replaced, payload_of
from tests.kernels.cuda.emulated import EmulatedLauncher, blockint
from tests.kernels.cuda.sources import NIGHTLY
from tests.stand_ins.gpu.common import gpu
from tests.stand_ins.gpu.machine import DEVICE, Gpu

__all__ = ["gpu"]  # a fixture

SETTINGS: list[dict[str, Any]] = [{"bits": 4}, {"bits": 4, "rotate": True}]
#: one value, full and partial tiles, none, more than a thread block holds
FEW = (1, 1024, 33, 0, 5000, 2048, 17)
MANY = tuple((7 * i) % 50 for i in range(NEAR + 60))


@pytest.mark.parametrize("lengths", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_parts_of_a_tensor(settings: dict[str, Any], lengths: tuple[int, ...]) -> None:
    """Of one rank, then of three ranks whose values and payloads lie apart."""
    codec, launcher, ranks = blockint(settings), EmulatedLauncher(), 3
    numels = np.array(lengths, dtype=np.int64)
    dtypes = VALUE_DTYPES if NIGHTLY else VALUE_DTYPES[1:2]
    for dtype in dtypes:
        whole = [arrays.make("nonfinite", sum(lengths), rank, dtype) for rank in range(ranks)]
        sizes = codec.wire_nbytes_of(numels, dtype)
        assert sizes.tolist() == [codec.wire_nbytes(n, dtype) for n in lengths]
        starts = numels.cumsum() - numels
        parts = StretchTable(starts, numels, sizes.cumsum() - sizes, starts)
        slot = int(sizes.sum())
        payloads = torch.full((ranks * slot,), 0xA5, dtype=torch.uint8)
        out = torch.full((ranks * sum(lengths),), 3.0, dtype=dtype)
        with kernels_replaced(CudaKernels(launcher)):
            kernel = codec.planned(torch.device("cpu"))
            assert kernel is not None
            for rank, values in enumerate(whole):
                kernel.encode(parts, values, payloads[rank * slot : (rank + 1) * slot])
            kernel.decode(parts, payloads, out, ranks, slot)
        backs = torch.split(out, sum(lengths))
        for values, payload, back in zip(whole, torch.split(payloads, slot), backs, strict=True):
            splits = (torch.split(each, list(lengths)) for each in (values, back))
            rooms = torch.split(payload, sizes.tolist())
            for one, found, room in zip(*splits, rooms, strict=True):
                assert torch.equal(payload_of(codec, one.clone()), room)
                assert torch.equal(decoded(codec, room, len(one), dtype), arrays.bits_of(found))
    assert {kernel.split("_")[2] for kernel in launcher.kernels} == {"encode", "decode"}
    assert len(launcher.kernels) == (ranks + 1) * len(dtypes)
    assert all(bool(far) == (len(numels) > NEAR) for _, far in launcher.tables)


def test_parts_without_values_and_a_wrong_place() -> None:
    codec, launcher = blockint({"bits": 4}), EmulatedLauncher()
    nothing, one = (np.array([n], dtype=np.int64) for n in (0, 40))
    with kernels_replaced(CudaKernels(launcher)):
        kernel = codec.planned(torch.device("cpu"))
        assert kernel is not None
        kernel.encode(
            StretchTable(nothing, nothing, nothing, nothing), torch.randn(40), torch.empty(0)
        )
        assert not launcher.kernels
        with pytest.raises(ValueError, match="multiple of 16 bytes"):
            room = torch.zeros(100, dtype=torch.uint8)[1:]
            kernel.encode(StretchTable(nothing, one, nothing, nothing), torch.randn(40), room)


def test_a_table_on_a_device_is_copied_once_and_kept_once_for_graphs(gpu: Gpu) -> None:
    """For any number of graph captures; the host does not wait."""
    codec = blockint({"bits": 3})
    kernel = codec.planned(DEVICE)
    assert isinstance(kernel, PlannedBlockInt)
    numels = np.full(NEAR + 1, 40, dtype=np.int64)
    starts, sizes = numels.cumsum() - numels, codec.wire_nbytes_of(numels, torch.float32)
    parts = StretchTable(starts, numels, sizes.cumsum() - sizes, starts)
    values = torch.zeros(int(numels.sum()), device=DEVICE)
    payloads = torch.zeros(int(sizes.sum()), dtype=torch.uint8, device=DEVICE)
    for capturing in (False, True, True, True):
        gpu.capturing = capturing
        kernel.encode(parts, values, payloads)
        kernel.decode(parts, payloads, values)
    gpu.capturing = False
    assert kernel._captured == {parts} and len(parts._on) == 1 and not gpu.waits


@pytest.mark.parametrize("skip", [0, 3, 5, len(FEW) - 1])
def test_parts_that_follow_each_other(skip: int) -> None:
    """One pass gives the layout of separate columns, for ``skip`` with and without values."""
    codec, numels = blockint({"bits": 4}), np.array(FEW, dtype=np.int64)
    sizes = codec.wire_nbytes_of(numels, torch.bfloat16)
    assert sizes.tolist() == [codec.wire_nbytes(n, torch.bfloat16) for n in FEW]
    table, total, start = StretchTable.of_parts(numels, sizes, skip, torch.device("cpu"))
    starts = numels.cumsum() - numels
    assert numels.tolist() == list(FEW) and sizes[skip] == 0
    assert (total, start) == (sizes.sum(), starts[skip])
    rest = numels.copy()
    rest[skip] = 0
    expected = StretchTable(starts, rest, sizes.cumsum() - sizes, starts)
    assert (table.tiles, table.near) == (expected.tiles, expected.near)
    assert np.array_equal(table.rows, expected.rows)
    with pytest.raises(ValueError, match="no such part"):
        StretchTable.of_parts(numels, sizes, len(FEW), torch.device("cpu"))
    with pytest.raises(ValueError, match="do not match"):
        StretchTable.of_parts(numels, sizes[1:], 0, torch.device("cpu"))
