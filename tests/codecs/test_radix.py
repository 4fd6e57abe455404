"""radix: bytes and values against the reference, and a bound that every element satisfies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybridcomp.codecs import VALUE_DTYPES, Radix
from hybridcomp.errors import CodecError
from tests.codecs import arrays, radix_reference
from tests.selection import by_day

BOUNDS = (0.9, 0.3, 3e-2, 1e-2, 1e-3, 1e-4, 3e-6, 1e-7, 1e-12)
SEGMENTS = (64, 256, 1040, 4096)
NARROW = (torch.bfloat16, torch.float16)

codecs = st.one_of(
    st.builds(Radix, st.sampled_from(BOUNDS), st.sampled_from(SEGMENTS)),
    st.builds(Radix, st.floats(1e-9, 0.99), st.sampled_from(SEGMENTS)),
    st.builds(
        lambda exponent, segment: Radix(10.0**exponent, segment, "abs"),
        st.floats(-37, 38),
        st.sampled_from(SEGMENTS),
    ),
)


def outside(codec: Radix, values: Tensor) -> Tensor:
    """Return indices of finite elements whose error exceeds the bound, compared exactly in fp64."""
    exact = values.double()
    absmax = exact.abs().masked_fill(~exact.isfinite(), 0)
    rows = torch.zeros(-(-len(exact) // codec.segment) * codec.segment, dtype=torch.float64)
    rows[: len(exact)] = absmax
    rows = rows.view(-1, codec.segment)
    # a float32 times a float32 is exact in fp64
    limit = codec.error_bound * (rows.amax(1, keepdim=True) if codec.mode == "rel" else 1.0)
    limits = torch.ones_like(rows) * limit
    wrong = torch.zeros(len(exact), dtype=torch.bool)
    for dtype in {torch.float32, values.dtype}:
        found = arrays.decoded(codec, values, dtype).double()
        wrong |= exact.isfinite() & ~((found - exact).abs() <= limits.view(-1)[: len(exact)])
        wrong |= ~exact.isfinite() & found.isfinite()
    return wrong.nonzero()


def assert_bound(codec: Radix, values: Tensor) -> None:
    wrong = outside(codec, values)
    assert not len(wrong), f"{codec}: {len(wrong)} outside, the first is element {int(wrong[0])}"


def check_against_reference(values: Tensor, codec: Radix) -> None:
    chosen = radix_reference.Settings(codec.error_bound, codec.segment, codec.mode == "rel")
    payload = radix_reference.encode(values, chosen)
    assert arrays.encoded(codec, values).numpy().tobytes() == payload
    found = arrays.decoded(codec, values)
    np.testing.assert_array_equal(found.numpy(), radix_reference.decode(payload))


@given(values=arrays.tensors(), codec=codecs)
@arrays.often(30)
def test_bytes_and_values_are_those_of_the_reference(values: Tensor, codec: Radix) -> None:
    check_against_reference(values, codec)


@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
@pytest.mark.parametrize("kind", by_day(arrays.KINDS, arrays.DAY))
def test_whole_segments_of_every_kind(kind: str, dtype: torch.dtype) -> None:
    check_against_reference(arrays.make(kind, 4096 + 300, 1, dtype), Radix(0.0078125))


@given(values=arrays.tensors(), codec=codecs)
@arrays.often(150)
def test_no_element_is_outside_its_bound(values: Tensor, codec: Radix) -> None:
    assert_bound(codec, values)


@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
@pytest.mark.parametrize("bound", BOUNDS)
def test_no_element_of_many_blocks_is_outside(bound: float, dtype: torch.dtype) -> None:
    blocks, rounds = 2048, 60 if arrays.NIGHTLY else 1
    for seed in range(rounds):
        for kind in ("normal", "outliers", "wide", "bits", "subnormal", "near max"):
            values = arrays.make(kind, 16 * blocks, seed, dtype)
            assert_bound(Radix(bound, SEGMENTS[seed % 4]), values)
            assert_bound(Radix(bound * 2.0 ** (seed % 7 - 3), mode="abs"), values)


def ties(bound: float, dtype: torch.dtype) -> Tensor:
    """Return segments of 64: 1.0 and floats around the edges of levels, half and whole steps."""
    half = torch.arange(1, 2000, dtype=torch.float64) * bound
    edges = torch.cat([half, half * (1 - 2**-22 / bound)])
    edges = edges[edges < 1].float().to(dtype)
    bits = arrays.bits_of(edges)
    around = torch.cat([bits + k for k in range(-3, 4)]).view(dtype)
    shuffled = around[torch.randperm(len(around), generator=torch.Generator().manual_seed(0))]
    # a 1.0 in each segment fixes its absmax
    rows = shuffled[: len(shuffled) // 63 * 63].view(-1, 63)
    return torch.cat([torch.ones(len(rows), 1, dtype=dtype), rows], dim=1).view(-1)


@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
@pytest.mark.parametrize("bound", [0.3, 0.1, 0.0625, 0.012, 0.01, 2.0**-9, 1e-3, 1e-5, 2e-7])
def test_floats_beside_every_edge(bound: float, dtype: torch.dtype) -> None:
    values = ties(bound, dtype)
    assert_bound(Radix(bound, 64), values)
    assert_bound(Radix(bound, mode="abs"), values)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_rounding_to_16_bits_is_part_of_the_bound(dtype: torch.dtype) -> None:
    """Every bound between a quarter and eight spacings of the largest value's octave."""
    spacing = torch.finfo(dtype).eps
    values = arrays.make("normal", 8192, 0, dtype)
    for eighths in range(2, 64, 3 if not arrays.NIGHTLY else 1):
        bound = spacing * eighths / 8
        assert_bound(Radix(bound, 256), values)
        # few blocks are raw: the size is close to that of fp32 values with this bound
        wide = arrays.encoded(Radix(bound, 4096), values.float()).numel()
        assert arrays.encoded(Radix(bound, 4096), values).numel() < 1.25 * wide


def test_bits_of_a_gaussian() -> None:
    """The docstring's figures hold."""
    values = torch.randn(2**18, generator=torch.Generator().manual_seed(0))
    wide, narrow = (arrays.encoded(Radix(bound), values).numel() for bound in (1e-1, 1e-2))
    assert wide * 8 < 3.1 * 2**18 and narrow * 8 < 6.15 * 2**18


def test_damaged_payloads_are_refused() -> None:
    values = arrays.make("sparse", 5000, 0)
    codec = Radix(1e-2, 1024)
    payload, out = arrays.encoded(codec, values), torch.empty(5000)
    for place, message in ((0, "not one of"), (4, "version"), (5, "dtype"), (6, "other settings"),
                           (8, "number of values"), (16, "other settings"), (20, "other settings"),
                           (25, "too short|damaged"), (36, "damaged"), (52 + 4, "damaged"),
                           (52 + 5, "damaged")):  # fmt: skip
        bad = payload.clone()
        bad[place] = 0x77
        with pytest.raises(CodecError, match=message):
            codec.decode(bad, out)
    with pytest.raises(CodecError, match="too short"):
        codec.decode(payload[:-64], out)
    with pytest.raises(CodecError, match="other settings"):
        Radix(2e-2, 1024).decode(payload, out)
