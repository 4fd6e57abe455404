"""blockint: bytes and values against the reference, and the properties of its format."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridcomp.codecs import BlockInt
from hybridcomp.codecs.blockint import Levels
from hybridcomp.errors import CodecError
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


def codec_of(bits: int, rotate: bool, levels: Levels, random: bool) -> BlockInt:
    return BlockInt(bits, rotate, levels, "random" if random else "nearest")


def encoded(codec: BlockInt, values: Tensor) -> Tensor:
    payload = torch.empty(codec.wire_nbytes(values.numel(), values.dtype), dtype=torch.uint8)
    assert codec.encode(values, payload) == payload.numel()
    return payload


def as_bytes(payload: Tensor) -> bytes:
    return payload.numpy().tobytes()


def check_against_reference(values: Tensor, variant: Variant) -> None:
    codec, floats = codec_of(*variant), values.float().numpy()
    payload = encoded(codec, values)
    expected = reference.blockint_encode(floats, *variant)
    assert as_bytes(payload) == expected

    decoded = torch.empty(values.numel())
    codec.decode(payload, decoded)
    np.testing.assert_array_equal(
        decoded.numpy(),
        reference.blockint_decode(expected, len(floats), *variant[:3]),
    )


@given(values=arrays.tensors(), variant=st.sampled_from(VARIANTS))
@settings(max_examples=200, deadline=None)
def test_bytes_and_values_are_those_of_the_reference(values: Tensor, variant: Variant) -> None:
    check_against_reference(values, variant)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "kind", by_day(arrays.KINDS, ["normal", "minus zeros", "outliers", "nonfinite"])
)
def test_whole_tiles_of_every_kind(kind: str, variant: Variant) -> None:
    check_against_reference(arrays.make(kind, 2048 + 104, seed=variant[0]), variant)


def test_nan_spoils_its_block_of_32_and_nothing_else() -> None:
    values = torch.ones(1024)
    values[40] = float("nan")
    values[100] = -float("inf")
    for bits in BITS:
        codec, decoded = BlockInt(bits=bits), torch.empty(1024)
        codec.decode(encoded(codec, values), decoded)
        lost = torch.zeros(1024, dtype=torch.bool)
        lost[32:64] = lost[96:128] = True
        assert torch.equal(decoded.isnan(), lost)
        assert torch.equal(decoded[~lost], torch.ones(1024)[~lost])


def test_rotated_nan_spoils_its_group_of_64_and_nothing_else() -> None:
    values = torch.ones(1024 + 100)
    values[70] = float("nan")
    values[200] = -float("inf")
    values[1024 + 90] = float("nan")  # behind the last whole group: spoils its block of 32
    for variant in VARIANTS:
        if variant[1]:
            codec, decoded = codec_of(*variant), torch.empty(len(values))
            codec.decode(encoded(codec, values), decoded)
            lost = torch.zeros(len(values), dtype=torch.bool)
            lost[64:128] = lost[192:256] = lost[1024 + 64 : 1024 + 96] = True
            assert torch.equal(decoded.isnan(), lost)


def test_rotation_spreads_an_outlier() -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    values[::32] *= 30
    plain, rotated = relative_error(BlockInt(4), values), relative_error(BlockInt(4, True), values)
    assert rotated < plain
    # without the rotation an outlier's neighbours vanish
    small = torch.arange(4096) % 32 != 0
    for codec, low, high in ((BlockInt(4), 0.7, 0.8), (BlockInt(4, True), 0.25, 0.4)):
        decoded = torch.empty_like(values)
        codec.decode(encoded(codec, values), decoded)
        assert low < float((decoded - values)[small].norm() / values[small].norm()) < high
    # without the signs a constant would concentrate in one coefficient
    assert relative_error(BlockInt(4, True), torch.ones(4096)) < 0.15


def test_gaussian_levels_fit_gaussian_values_and_keep_blocks_of_zeros() -> None:
    values = torch.randn(2**16, generator=torch.Generator().manual_seed(0))
    plain = relative_error(BlockInt(4), values)
    assert relative_error(BlockInt(4, levels="gaussian"), values) < 0.083 < 0.098 < plain
    values[64:96] = 0
    decoded = torch.empty_like(values)
    codec = BlockInt(4, levels="gaussian")
    codec.decode(encoded(codec, values), decoded)
    assert not decoded[64:96].any()


def test_lloyd_levels_fit_gaussian_values_and_keep_zeros() -> None:
    values = torch.randn(2**16, generator=torch.Generator().manual_seed(0))
    values[::3] = 0.0
    dense = values[values != 0][: 2**15]
    assert relative_error(BlockInt(4, levels="lloyd"), dense) < 0.0864 < 0.098
    decoded = torch.empty_like(values)
    codec = BlockInt(4, levels="lloyd")
    codec.decode(encoded(codec, values), decoded)
    assert not decoded[::3].any()
    assert torch.equal(decoded.sign() * values.sign() == -1, torch.zeros(2**16, dtype=torch.bool))


@pytest.mark.parametrize("instructions", ["plain", "avx2", "avx512"])
def test_lloyd_levels_have_the_same_bytes_with_all_instructions(instructions: str) -> None:
    values = torch.cat([arrays.make(kind, 4096 + 40, seed=7) for kind in arrays.KINDS])
    try:
        if LIMITS.limit(instructions) != instructions:
            pytest.skip(f"this machine lacks {instructions}")
        check_against_reference(values, (4, False, "lloyd", False))
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
        payload = encoded(codec, values)
        decoded = torch.empty_like(values)
        codec.decode(payload, decoded)
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


def test_lloyd_takes_the_scale_with_less_error_nearly_always() -> None:
    values = torch.randn(2**15, generator=torch.Generator().manual_seed(1)).numpy()
    chosen = best = 0.0
    for block in values.reshape(-1, 32):
        top = (int(np.abs(block).max().view(np.uint32)) + 0x7FFFF) >> 19
        base = top >> 4
        code = 16 * base + 15 - top
        errors = [
            float(np.square(block - nearest_lloyd(block, code + more, base)).sum())
            for more in (0, 1)
        ]
        chosen += errors[reference.lloyd_code(block, code, base) - code]
        best += min(errors)
    assert best <= chosen < 1.012 * best


def nearest_lloyd(block: reference.Floats, code: int, base: int) -> reference.Floats:
    """Each value's nearest level of a scale."""
    levels = reference.lloyd_values(code, base)
    nearest: reference.Floats = levels[np.abs(block[:, None] - levels).argmin(axis=1)]
    return nearest


def relative_error(codec: BlockInt, values: Tensor) -> float:
    decoded = torch.empty_like(values)
    codec.decode(encoded(codec, values), decoded)
    return float((decoded - values).norm() / values.norm())


def test_a_small_block_keeps_its_precision_beside_a_large_one() -> None:
    values = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    values[32:64] *= 1e-4
    codec, decoded = BlockInt(bits=8), torch.empty(1024)
    codec.decode(encoded(codec, values), decoded)
    small = slice(32, 64)
    step = float(values[small].abs().max()) * 17 / 16 / 127
    assert float((decoded - values)[small].abs().max()) <= 0.5001 * step


def test_scale_costs_a_quarter_bit() -> None:
    assert BlockInt(bits=8).wire_nbytes(2**20, torch.float32) * 8 / 2**20 == pytest.approx(
        8.2578125
    )
    assert BlockInt(bits=4).wire_nbytes(2**20, torch.bfloat16) * 8 / 2**20 < 4.27


def test_lengths_may_be_any_array_of_integers() -> None:
    numels, codec = np.array([[0, 1], [31, 33], [1025, 10**6]]), BlockInt(bits=4)
    expected = [codec.wire_nbytes(int(numel), torch.bfloat16) for numel in numels[:, 1]]
    arrays_of: list[Any] = [numels[:, 1], numels[:, 1].astype(np.int32)]
    for lengths in arrays_of:
        assert codec.wire_nbytes_of(lengths, torch.bfloat16).tolist() == expected


def test_fp16_and_bf16_saturate_instead_of_becoming_inf() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        largest = torch.finfo(dtype).max
        values = torch.full((64,), largest, dtype=dtype)
        for variant in VARIANTS:
            codec, decoded = codec_of(*variant), torch.empty(64, dtype=dtype)
            codec.decode(encoded(codec, values), decoded)
            assert decoded.isfinite().all()


@pytest.mark.parametrize("bits", [1, 9, 0, -4, 4.0, True, "8", None])
def test_impossible_bits_are_refused(bits: object) -> None:
    with pytest.raises(CodecError, match="bits"):
        BlockInt(bits=bits)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bits": 5, "rotate": True}, "rotate.*4 bits and fewer"),
        ({"bits": 4, "rotate": 1}, "rotate must be true or false"),
        ({"bits": 3, "levels": "gaussian"}, "levels gaussian.*4 bits"),
        ({"bits": 8, "levels": "lloyd"}, "levels lloyd are 15, for 4 bits and not 8"),
        ({"bits": 4, "levels": "normal"}, "levels must be one of"),
        ({"rounding": "up"}, "rounding must be one of"),
        ({"bits": 4, "levels": "gaussian", "rounding": "random"}, "random needs levels that"),
        ({"bits": 4, "levels": "lloyd", "rounding": "random"}, "has levels lloyd; remove one"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    settings: dict[str, object], words: str
) -> None:
    with pytest.raises(CodecError, match=words):
        BlockInt(**settings)  # type: ignore[arg-type]
