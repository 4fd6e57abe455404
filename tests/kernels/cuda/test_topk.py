"""topk's CUDA kernels: the CPU's bytes and values, in the emulator and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hybridcomp import kernels
from hybridcomp.codecs.topk import TopK
from hybridcomp.errors import CodecError
from hybridcomp.kernels.cuda import CudaKernels
from hybridcomp.kernels.cuda.functions import DamageFlag
from tests.codecs import guarded
from tests.codecs.arrays import encoded
from tests.codecs.test_topk import CODECS, INTEGERS, VALUES, bits_of
from tests.kernels.cuda.common import kernels_replaced
from tests.kernels.cuda.emulated import EmulatedLauncher
from tests.kernels.cuda.sources import NIGHTLY
from tests.selection import by_day

KERNELS = CudaKernels(EmulatedLauncher())
LENGTHS = (1, 63, 4096, 4097, 12345)


def outcomes(codec: TopK, values: Tensor, place: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return payload, bits of values and of a sum; ``place`` moves to the kernels' device."""
    there, total = place(values), place(torch.linspace(-1, 1, values.numel()))
    room = torch.full((codec.wire_nbytes(values.numel(), values.dtype),), 77, dtype=torch.uint8)
    slot = place(room)
    payload, out = slot[: codec.encode(there, slot)], torch.full_like(there, 3.0)
    codec.decode(payload, out)
    codec.decode_add(payload, total, values.dtype)
    return [payload.cpu(), bits_of(out.cpu()), bits_of(total.cpu())]


def check(codec: TopK, values: Tensor, place: Callable[[Tensor], Tensor] = torch.clone) -> None:
    """Compare with the CPU's kernels."""
    expected = outcomes(codec, values, torch.clone)
    on_cpu = place is torch.clone
    with kernels_replaced(KERNELS) if on_cpu else mock.MagicMock():
        found = outcomes(codec, values, place)
    for name, right, wrong in zip(("payload", "values", "sum"), expected, found, strict=True):
        assert torch.equal(right, wrong), (codec, values.dtype, values.numel(), name)


@pytest.mark.parametrize("dtype", by_day(INTEGERS, [torch.bfloat16]), ids=str)
@pytest.mark.parametrize("kind", VALUES)
def test_bytes_are_the_cpus(kind: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    for codec in CODECS if NIGHTLY else CODECS[:3]:
        for numel in LENGTHS if NIGHTLY else LENGTHS[1::2]:
            check(codec, VALUES[kind](torch.randn(numel, generator=generator)).to(dtype))
    KERNELS.check()


@pytest.mark.nightly
def test_more_chunks_than_are_added_up_at_once() -> None:
    values = torch.randn(600 * 4096, generator=torch.Generator().manual_seed(2))
    values.view(-1, 4096)[5:200] = 0
    check(TopK(density=1 / 1024), values)
    KERNELS.check()


def test_places_far_apart_and_views() -> None:
    """Empty chunks between others, more gaps than a block decodes, unaligned values."""
    values = torch.zeros(20 * 4096)
    values[3], values[-5] = 2.0, -1.0
    check(TopK(bits=8, density=1.0), values)
    check(TopK(), torch.randn(9001, generator=torch.Generator().manual_seed(2))[1:])
    KERNELS.check()


def test_sizes_are_left_on_the_device() -> None:
    refuse = AssertionError("the host waited")
    for numel in (0, 5000):
        values, sizes, codec = torch.randn(numel), torch.full((3,), -7), TopK()
        expected = encoded(codec, values)
        room = torch.empty(codec.wire_nbytes(numel, values.dtype), dtype=torch.uint8)
        with (
            kernels_replaced(KERNELS),
            mock.patch.object(DamageFlag, "check", side_effect=refuse),
        ):
            codec.encode_into(values, room, sizes[1:2])
        assert sizes.tolist() == [-7, expected.numel(), -7]
        assert torch.equal(room[: expected.numel()], expected)


def test_nothing_beside_the_arrays_is_touched() -> None:
    """Arrays end at an unreadable page: an access beyond crashes."""
    for codec in (TopK(), TopK(bits=8, density=1.0)):
        for dtype in INTEGERS:
            values = guarded.copy(torch.randn(5001).to(dtype))
            with kernels_replaced(KERNELS):
                room = guarded.empty(codec.wire_nbytes(5001, dtype))
                payload = guarded.copy(room[: codec.encode(values, room)])
                codec.decode(payload, guarded.empty(5001 * dtype.itemsize, dtype))
    KERNELS.check()


def test_damage_is_told_at_the_check_and_never_a_crash() -> None:
    codec, values = TopK(density=0.01), torch.randn(9000)
    payload = encoded(codec, values)
    for place, byte in ((0, 255), (5, 255), (8, 1), (-20, 0)):
        broken = payload.clone()
        broken[place] = byte
        with kernels_replaced(KERNELS):
            codec.decode(broken, torch.empty(9000))
        with pytest.raises(CodecError, match="damaged"):
            KERNELS.check()
    generator = torch.Generator().manual_seed(0)
    for _ in range(300 if NIGHTLY else 30):
        broken = guarded.copy(payload)
        places = torch.randint(0, payload.numel(), (3,), generator=generator)
        broken[places] = torch.randint(0, 256, (3,), generator=generator, dtype=torch.uint8)
        with kernels_replaced(KERNELS):
            codec.decode(broken, guarded.empty(36_000, torch.float32))
    KERNELS.damage.word.zero_()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    for codec in CODECS:
        for kind in VALUES.values():
            for numel in (*LENGTHS, 3_000_001):
                values = kind(torch.randn(numel, generator=generator)).to(dtype)
                check(codec, values, lambda tensor: tensor.cuda())
    functions: Any = kernels.kernels_of(torch.device("cuda"))
    functions.check()
