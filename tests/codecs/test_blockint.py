"""blockint: bytes and values against the reference, and the properties of its format."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybridcomp.codecs import BlockInt
from hybridcomp.codecs.blockint import Levels
from hybridcomp.kernels import KernelSet
from tests.codecs import arrays, reference
from tests.selection import by_day

BITS = tuple(range(2, 9))
LIMITS: Any = KernelSet[Any]("instructions").on(torch.device("cpu"))
#: bits, rotate, spacing of the levels, rounded at random
Variant = tuple[int, bool, Levels, bool]
SPACED: tuple[Levels, ...] = ("gaussian", "lloyd")
VARIANTS: tuple[Variant, ...] = (
    *((bits, False, "uniform", random) for bits in BITS for random in (False, True)),
    *((bits, True, "uniform", random) for bits in (2, 3, 4) for random in (False, True)),
    *((4, rotate, spacing, False) for rotate in (False, True) for spacing in SPACED),
)
DAY = [
    variant
    for variant in VARIANTS
    if variant[0] in (2, 8) or variant[2] != "uniform" or variant == (3, True, "uniform", True)
]


def codec_of(bits: int, rotate: bool, levels: Levels, random: bool) -> BlockInt:
    return BlockInt(bits, rotate, levels, "random" if random else "nearest")


def check_against_reference(values: Tensor, variant: Variant) -> None:
    codec, floats = codec_of(*variant), values.float().numpy()
    expected = reference.blockint_encode(floats, *variant)
    assert arrays.encoded(codec, values).numpy().tobytes() == expected
    values_back = reference.blockint_decode(expected, len(floats), *variant[:3])
    np.testing.assert_array_equal(arrays.decoded(codec, values).numpy(), values_back)


@given(values=arrays.tensors(), variant=st.sampled_from(VARIANTS))
@arrays.often(60)
def test_bytes_and_values_are_those_of_the_reference(values: Tensor, variant: Variant) -> None:
    check_against_reference(values, variant)


@pytest.mark.parametrize(("variant",), by_day([(v,) for v in VARIANTS], [(v,) for v in DAY]))
@pytest.mark.parametrize("kind", by_day(arrays.KINDS, arrays.DAY))
def test_whole_tiles_of_every_kind(kind: str, variant: Variant) -> None:
    check_against_reference(arrays.make(kind, 2048 + 104, seed=variant[0]), variant)


def test_rotation_spreads_an_outlier() -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    values[::32] *= 30
    plain, rotated = relative_error(BlockInt(4), values), relative_error(BlockInt(4, True), values)
    assert rotated < plain
    # without the rotation an outlier's neighbours vanish
    small = torch.arange(4096) % 32 != 0
    for codec, low, high in ((BlockInt(4), 0.7, 0.8), (BlockInt(4, True), 0.25, 0.4)):
        decoded = arrays.decoded(codec, values)
        assert low < float((decoded - values)[small].norm() / values[small].norm()) < high
    # without the signs a constant would concentrate in one coefficient
    assert relative_error(BlockInt(4, True), torch.ones(4096)) < 0.15


def test_gaussian_levels_fit_gaussian_values_and_keep_blocks_of_zeros() -> None:
    values = torch.randn(2**16, generator=torch.Generator().manual_seed(0))
    plain = relative_error(BlockInt(4), values)
    assert relative_error(BlockInt(4, levels="gaussian"), values) < 0.083 < 0.098 < plain
    values[64:96] = 0
    assert not arrays.decoded(BlockInt(4, levels="gaussian"), values)[64:96].any()


def test_lloyd_levels_fit_gaussian_values_and_keep_zeros() -> None:
    values = torch.randn(2**16, generator=torch.Generator().manual_seed(0))
    values[::3] = 0.0
    dense = values[values != 0][: 2**15]
    assert relative_error(BlockInt(4, levels="lloyd"), dense) < 0.0864 < 0.098
    decoded = arrays.decoded(BlockInt(4, levels="lloyd"), values)
    assert not decoded[::3].any()
    assert torch.equal(decoded.sign() * values.sign() == -1, torch.zeros(2**16, dtype=torch.bool))


def test_lloyd_levels_have_the_same_bytes_with_all_instructions() -> None:
    values = torch.cat([arrays.make(kind, 1024 + 40, seed=7) for kind in arrays.KINDS])
    expected = reference.blockint_encode(values.numpy(), 4, False, "lloyd")
    try:
        for instructions in ("plain", "avx2", "avx512"):
            LIMITS.limit(instructions)  # a machine without them takes the next best
            payload = arrays.encoded(BlockInt(4, levels="lloyd"), values)
            assert payload.numpy().tobytes() == expected, instructions
    finally:
        LIMITS.limit("avx512")


@pytest.mark.parametrize("mantissa", range(16))
def test_lloyd_levels_keep_their_bound_at_every_magnitude(mantissa: int) -> None:
    """Blocks sent with either scale, at each of the 16 tops of an octave."""
    top = 1 + mantissa / 16
    codec, either = BlockInt(4, levels="lloyd"), set[int]()
    for filler in np.linspace(0.0, 1.0, 65, dtype=np.float32):
        block = torch.full((65, 32), float(filler) * top)
        block[:, 0] = top
        block[:, 1:17] = (torch.linspace(0, top, 65 * 16)).reshape(65, 16)
        values = torch.cat([block, -block]).reshape(-1)
        payload, decoded = arrays.encoded(codec, values), arrays.decoded(codec, values)
        assert float((decoded - values).abs().max()) <= codec.element_bound(top, torch.float32)
        either.update(payload[values.numel() // 2 :][: values.numel() // 32].tolist())
    assert len(either) == 2, "one scale was never chosen"


@pytest.mark.parametrize("lower", [0, 1])
@pytest.mark.parametrize("mantissa", range(16))
def test_lloyd_levels_keep_their_bound_for_every_rounded_value(mantissa: int, lower: int) -> None:
    """Proves the bound: covers all that decoding depends on, and the edges of each rounding."""
    code, fine = 15 - mantissa, np.arange(128)
    top, sent = (2 * reference.half_top_of(one, 128) for one in (code, code + lower))
    values = (fine * (top / 127)).astype(np.float32)
    levels = reference.lloyd_levels(values, top / 2, sent / 2)
    decoded = reference.lloyd_values(code + lower, 128)[np.array(levels) - 1] / top
    ends = np.clip(np.stack([fine - 0.5, fine + 0.5]) / 127, 0, 1)
    worst = float(np.abs(ends - decoded).max())
    assert worst < 0.10365, "of T"
    assert BlockInt(4, levels="lloyd").element_bound(16 / 17, torch.float32) > worst


def relative_error(codec: BlockInt, values: Tensor) -> float:
    return float((arrays.decoded(codec, values) - values).norm() / values.norm())


def test_lengths_may_be_any_array_of_integers() -> None:
    numels, codec = np.array([[0, 1], [31, 33], [1025, 10**6]]), BlockInt(bits=4)
    expected = [codec.wire_nbytes(int(numel), torch.bfloat16) for numel in numels[:, 1]]
    arrays_of: list[Any] = [numels[:, 1], numels[:, 1].astype(np.int32)]
    for lengths in arrays_of:
        assert codec.wire_nbytes_of(lengths, torch.bfloat16).tolist() == expected
