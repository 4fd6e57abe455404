"""stepcode's CUDA kernels: the CPU's bytes and values, in the emulator and on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hybridcomp import kernels
from hybridcomp.codecs import StepCode
from hybridcomp.errors import CodecError
from hybridcomp.kernels.cuda import CudaKernels
from tests.codecs import arrays, guarded, stepcode_reference
from tests.kernels.cuda.common import kernels_replaced
from tests.kernels.cuda.emulated import KERNELS, EmulatedLauncher
from tests.kernels.cuda.sources import NIGHTLY
from tests.selection import by_day

CODEC = StepCode()
#: bytes of ``Plan`` before its counts
PLAN_HEAD = 32
DTYPES = (torch.bfloat16, torch.float16)
#: empty, coded and stored tiles; stored messages
CASES = (
    ("normal", "few", 1), ("normal", "nothing", 31), ("normal", "many", 1025),
    ("zeros", "far", 300),
    ("nonfinite", "signs", 4099), ("wide", "far", 9000), ("bits", "everything", 9000),
    ("normal", "one", 20_000), ("sparse", "many", 70_001), ("normal", "few", 70_000),
)  # fmt: skip


def encoded(values: Tensor, reference: Tensor) -> Tensor:
    room = torch.full(
        (CODEC.wire_nbytes(values.numel(), values.dtype),), 0xA5, dtype=torch.uint8,
        device=values.device,
    )  # fmt: skip
    return room[: CODEC.encode(values, reference, room)]


def check(values: Tensor, reference: Tensor, place: Callable[[Tensor], Tensor]) -> None:
    """Compare bytes and values; ``place`` moves a tensor to the kernels' device."""
    expected = encoded(values, reference)
    there, old = place(values), place(reference)
    with kernels_replaced(KERNELS) if there.device.type == "cpu" else mock.MagicMock():
        assert torch.equal(encoded(there, old).cpu(), expected)
        held, out = old.clone(), torch.full_like(there, 3.0)
        CODEC.decode(place(expected), held, held)
        CODEC.decode(place(expected), old, out)
    for found in (held, out):
        assert torch.equal(arrays.bits_of(found.cpu()), arrays.bits_of(values))


@pytest.mark.parametrize("dtype", by_day(DTYPES, DTYPES[:1]), ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_are_the_cpus(case: tuple[str, str, int], dtype: torch.dtype) -> None:
    values, reference = stepcode_reference.pair(*case, 7, dtype)
    check(values, reference, torch.clone)
    KERNELS.check()


def test_tiles_of_several_kinds() -> None:
    """Noise, small deltas and unchanged values in one message of many tiles."""
    values, reference = stepcode_reference.pair("normal", "many", 90_001, 3, torch.bfloat16)
    noise, _ = stepcode_reference.pair("normal", "everything", 30_000, 3, torch.bfloat16)
    values[20_000:50_000] = noise
    values[60_000:] = reference[60_000:]
    check(values, reference, torch.clone)
    KERNELS.check()


class NoSampleIsUnchanged(EmulatedLauncher):
    """Drops the samples of unchanged values, as in long messages, where most are not sampled."""

    def launch(self, *given: Any, **options: Any) -> None:
        if given[2] == "stepcode_model":
            counts = (ctypes.c_uint32 * (16 * 128)).from_address(given[5] + PLAN_HEAD)
            counts[::128] = [0] * 16
        super().launch(*given, **options)


@pytest.mark.parametrize("changed", [0, 1, 512])
def test_unchanged_values_that_take_more_room_than_a_tile_has(changed: int) -> None:
    """The coder processes a tile backwards, so it meets the changed first values last."""
    old = torch.ones(9000, dtype=torch.bfloat16)
    new = old.clone()
    new[:changed] = 1.5
    new[8192 : 8192 + changed] = 1.5
    with kernels_replaced(CudaKernels(NoSampleIsUnchanged())):
        payload = encoded(new, old)
    out = torch.zeros_like(new)
    CODEC.decode(payload, old, out)
    assert torch.equal(out, new)
    assert changed or payload.numel() < 100


@pytest.mark.parametrize("offset", [1, 3])
def test_views_that_are_not_aligned(offset: int) -> None:
    values, reference = stepcode_reference.pair("normal", "many", 9001, 3, torch.bfloat16)
    check(values[offset:], reference[offset:], lambda whole: whole)
    KERNELS.check()


def test_nothing_beside_the_arrays_is_touched() -> None:
    """Arrays end at an unreadable page: an access beyond crashes."""
    for change in ("few", "many", "far", "everything"):
        pair = stepcode_reference.pair("normal", change, 9531, 3, torch.bfloat16)
        values, reference = (guarded.copy(one) for one in pair)
        with kernels_replaced(KERNELS):
            room = guarded.empty(CODEC.wire_nbytes(9531, torch.bfloat16))
            payload = guarded.copy(room[: CODEC.encode(values, reference, room)])
            out = guarded.empty(2 * 9531, torch.bfloat16)
            CODEC.decode(payload, reference, out)
        assert torch.equal(arrays.bits_of(out), arrays.bits_of(values))


@pytest.mark.parametrize("place", [0, 4, 5, 6, 8, 16, 20, 24, 32, 33, -400])
def test_damage_is_told_at_the_check(place: int) -> None:
    values, reference = stepcode_reference.pair("normal", "many", 9000, 3, torch.bfloat16)
    broken = encoded(values, reference).clone()
    broken[place] ^= 0x7F
    with kernels_replaced(KERNELS):
        CODEC.decode(broken, reference, torch.empty_like(values))
    with pytest.raises(CodecError, match="damaged"):
        KERNELS.check()
    KERNELS.check()


def test_random_bytes_never_crash() -> None:
    generator = torch.Generator().manual_seed(0)
    for change in ("few", "far"):
        values, reference = stepcode_reference.pair("normal", change, 9000, 3, torch.bfloat16)
        payload, old = encoded(values, reference), guarded.copy(reference)
        for turn in range(200 if NIGHTLY else 12):
            broken = guarded.copy(payload)
            first = min((0, 32, 400)[turn % 3], broken.numel() - 1)
            where = torch.randint(first, broken.numel(), (4,), generator=generator)
            broken[where] = torch.randint(0, 256, (4,), generator=generator).byte()
            with kernels_replaced(KERNELS):
                CODEC.decode(broken, old, guarded.empty(2 * 9000, torch.bfloat16))
    KERNELS.damage.word.zero_()


def test_without_a_reference_it_is_expcode() -> None:
    values = arrays.make("normal", 5000, 1, torch.bfloat16)
    room = torch.empty(CODEC.wire_nbytes(5000, torch.bfloat16), dtype=torch.uint8)
    with kernels_replaced(KERNELS):
        used, out = CODEC.encode(values, None, room), torch.empty_like(values)
        CODEC.decode(room[:used], None, out)
    assert torch.equal(arrays.bits_of(out), arrays.bits_of(values))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    for case in (*CASES, ("normal", "many", 3_000_001), ("normal", "few", 9_000_000)):
        check(*stepcode_reference.pair(*case, 7, dtype), place=lambda tensor: tensor.cuda())
    functions: Any = kernels.kernels_of(torch.device("cuda"))
    functions.check()
