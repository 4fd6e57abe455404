"""The CUDA kernels run on the host: the CPU's bytes, and no access beyond the arrays."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from hybridcomp import kernels
from hybridcomp.channels import Channels
from hybridcomp.codecs import VALUE_DTYPES, Codec, make_codec
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import CodecError
from hybridcomp.kernels.cuda.functions import DamageFlag
from tests.codecs import arrays, guarded
from tests.kernels.cuda.common import WITH_TOPK, kernels_replaced, payload_of
from tests.kernels.cuda.emulated import KERNELS, check
from tests.kernels.cuda.sources import NIGHTLY
from tests.selection import by_day

VARIABLE = [codec for codec in WITH_TOPK if not codec.fixed_size]
#: five settings of blockint run nightly only: each needs two more libraries
DAY = [codec for number, codec in enumerate(WITH_TOPK) if number not in (6, 7, 9, 12, 14)]


@pytest.mark.parametrize("dtype", by_day(VALUE_DTYPES, VALUE_DTYPES[:2]), ids=str)
@pytest.mark.parametrize("codec", by_day(WITH_TOPK, DAY), ids=str)
def test_bytes_are_the_cpus(codec: Codec, dtype: torch.dtype) -> None:
    for seed, (kind, numel) in enumerate(
        (
            ("outliers", 1), ("normal", 31), ("sparse", 1025), ("nonfinite", 4099),
            ("wide", 5000), ("subnormal", 2050), ("near max", 1024), ("bits", 9000),
        )
    ):  # fmt: skip
        check(codec, arrays.make(kind, numel, seed, dtype))


@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
@pytest.mark.parametrize("codec", VARIABLE, ids=str)
def test_sizes_are_left_on_the_device(codec: Codec, dtype: torch.dtype) -> None:
    """Equal to the CPU's, in a device word; neither size nor damage is read by the host."""
    refuse = AssertionError("the host waited")
    for kind, numel in (("normal", 0), ("outliers", 1), ("sparse", 9000), ("nonfinite", 4099)):
        values = arrays.make(kind, numel, 3, dtype)
        expected, sizes = payload_of(codec, values), torch.full((3,), -7)
        room = torch.full((codec.wire_nbytes(numel, dtype),), 0xA5, dtype=torch.uint8)
        decoded, out = torch.empty_like(values), torch.empty_like(values)
        codec.decode(expected, decoded)
        with kernels_replaced(KERNELS):
            with mock.patch.object(DamageFlag, "check", side_effect=refuse):
                codec.encode_into(values, room, sizes[1:2])
            codec.decode(room, out)  # the whole slot
        assert sizes.tolist() == [-7, expected.numel(), -7]
        assert torch.equal(room[: expected.numel()], expected)
        assert torch.equal(arrays.bits_of(out), arrays.bits_of(decoded))
    KERNELS.check()


def test_sizes_need_a_word() -> None:
    codec, values = make_codec("radix"), torch.randn(100)
    room = torch.empty(codec.wire_nbytes(100, values.dtype), dtype=torch.uint8)
    for wrong in (torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)):
        for name in ("radix", "expcode"):
            codec = make_codec(name)
            with (
                kernels_replaced(KERNELS),
                pytest.raises(CodecError, match="size must be one torch.int64 on cpu"),
            ):
                codec.encode_into(values, room, wrong)


@pytest.mark.nightly
@pytest.mark.parametrize("bits", [2, 5, 6])
def test_the_other_widths(bits: int) -> None:
    """Their fields are those of other widths."""
    for dtype in VALUE_DTYPES:
        check(make_codec("blockint", bits=bits), arrays.make("nonfinite", 5000, bits, dtype))


@settings(max_examples=400 if NIGHTLY else 10)
@given(arrays.tensors())
def test_arrays_of_hypothesis(values: Tensor) -> None:
    for codec in WITH_TOPK if NIGHTLY else DAY:
        check(codec, values)


@pytest.mark.parametrize("offset", [1, 2, 3])
@pytest.mark.parametrize("codec", by_day(WITH_TOPK, DAY), ids=str)
def test_views_that_are_not_aligned(codec: Codec, offset: int) -> None:
    check(codec, arrays.make("normal", 3001, offset)[offset:])


@pytest.mark.parametrize("codec", by_day(WITH_TOPK, DAY), ids=str)
def test_nothing_beside_the_arrays_is_touched(codec: Codec) -> None:
    """Arrays end at an unreadable page: an access beyond crashes."""
    with kernels_replaced(KERNELS):
        for dtype in VALUE_DTYPES:
            values = guarded.copy(arrays.make("nonfinite", 2531, 1, dtype))
            room = guarded.empty(codec.wire_nbytes(values.numel(), dtype))
            payload = guarded.copy(room[: codec.encode(values, room)])
            out = guarded.empty(values.numel() * dtype.itemsize, dtype)
            codec.decode(payload, out)


@pytest.mark.parametrize("name", ["mpc", "radix", "expcode"])
def test_damaged_payloads_are_told_at_the_check(name: str) -> None:
    codec, values = make_codec(name), arrays.make("normal", 5000, 1)
    payload = payload_of(codec, values)
    out = torch.empty_like(values)
    for position, byte in ((0, 0), (24 if name != "mpc" else 4, 255), (9, 1)):
        broken = payload.clone()
        broken[position] ^= byte | 1
        with kernels_replaced(KERNELS):
            codec.decode(broken, out)
        if (name, position) == ("mpc", 9):
            KERNELS.damage.word.zero_()  # a byte of its bitmap: still a stream of some values
            continue
        with pytest.raises(CodecError, match="damaged"):
            KERNELS.check()
    KERNELS.check()


def test_random_bytes_never_crash() -> None:
    """All payload fields are checked against the length."""
    generator = torch.Generator().manual_seed(0)
    for name in ("mpc", "radix", "expcode", "topk"):
        codec, values = make_codec(name), arrays.make("normal", 2500, 1)
        payload = payload_of(codec, values)
        for _ in range(200 if NIGHTLY else 20):
            broken = guarded.copy(payload)
            where = torch.randint(
                0 if name == "topk" else 32, broken.numel(), (8,), generator=generator
            )
            broken[where] = torch.randint(0, 256, (8,), generator=generator).to(torch.uint8)
            with kernels_replaced(KERNELS):
                codec.decode(broken, guarded.empty(values.numel() * 4, torch.float32))
    KERNELS.damage.word.zero_()


def test_payloads_that_are_not_aligned_are_refused() -> None:
    blockint: Any = KERNELS.functions("blockint")
    values, room = torch.randn(64), torch.empty(256, dtype=torch.uint8)
    start = -(-room.data_ptr() // 16) * 16 + 4
    with pytest.raises(ValueError, match="multiple of 16"):
        blockint.encode(8, 0, values.data_ptr(), 64, start, 100, 1)


def test_the_ledgers_report_is_where_damage_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, values = make_codec("radix"), arrays.make("normal", 5000, 1)
    broken = payload_of(codec, values)
    broken[0] ^= 1
    monkeypatch.setitem(kernels._on_cuda, 0, KERNELS)
    with kernels_replaced(KERNELS):
        codec.decode(broken, torch.empty_like(values))
    with pytest.raises(CodecError, match="damaged"):
        kernels.check_payloads()
    kernels.check_payloads()


def test_damage_is_told_without_waiting_and_without_a_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A flag copied after one step is checked after the next."""
    codec, values = make_codec("radix"), arrays.make("normal", 5000, 1)
    broken = payload_of(codec, values)
    broken[0] ^= 1
    monkeypatch.setitem(kernels._on_cuda, 0, KERNELS)
    channels = Channels(CompressionConfig.parse({"dp": "bf16"}))
    channels.close_step(False, torch.device("cpu"))
    with kernels_replaced(KERNELS):
        codec.decode(broken, torch.empty_like(values))
    channels.close_step(False, torch.device("cpu"))  # headers before that were not damaged
    with pytest.raises(CodecError, match="go on from the last checkpoint"):
        channels.close_step(False, torch.device("cpu"))
    for _ in range(3):  # reported once
        channels.close_step(False, torch.device("cpu"))
