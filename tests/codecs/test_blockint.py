"""blockint: bytes and values against the reference, and the properties of its format."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridcomp.codecs import BlockInt
from hybridcomp.errors import CodecError
from tests.codecs import arrays, reference

BITS = tuple(range(2, 9))


def encoded(codec: BlockInt, values: Tensor) -> Tensor:
    payload = torch.empty(codec.wire_nbytes(values.numel(), values.dtype), dtype=torch.uint8)
    assert codec.encode(values, payload) == payload.numel()
    return payload


def as_bytes(payload: Tensor) -> bytes:
    return payload.numpy().tobytes()


@given(values=arrays.tensors(), bits=st.sampled_from(BITS))
@settings(max_examples=150, deadline=None)
def test_bytes_and_values_are_those_of_the_reference(values: Tensor, bits: int) -> None:
    codec = BlockInt(bits=bits)
    floats = values.float().numpy()
    payload = encoded(codec, values)
    expected = reference.blockint_encode(floats, bits)
    assert as_bytes(payload) == expected

    decoded = torch.empty(values.numel())
    codec.decode(payload, decoded)
    np.testing.assert_array_equal(
        decoded.numpy(), reference.blockint_decode(expected, len(floats), bits)
    )


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", arrays.KINDS)
def test_whole_tiles_of_every_kind(kind: str, bits: int) -> None:
    values = arrays.make(kind, 2048 + 40, seed=bits)
    payload = encoded(BlockInt(bits=bits), values)
    expected = reference.blockint_encode(values.numpy(), bits)
    assert as_bytes(payload) == expected
    decoded = torch.empty(values.numel())
    BlockInt(bits=bits).decode(payload, decoded)
    np.testing.assert_array_equal(
        decoded.numpy(), reference.blockint_decode(expected, values.numel(), bits)
    )


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


def test_fp16_and_bf16_saturate_instead_of_becoming_inf() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        largest = torch.finfo(dtype).max
        values = torch.full((64,), largest, dtype=dtype)
        for bits in BITS:
            codec, decoded = BlockInt(bits=bits), torch.empty(64, dtype=dtype)
            codec.decode(encoded(codec, values), decoded)
            assert decoded.isfinite().all()


@pytest.mark.parametrize("bits", [1, 9, 0, -4, 4.0, True, "8", None])
def test_impossible_bits_are_refused(bits: object) -> None:
    with pytest.raises(CodecError, match="bits"):
        BlockInt(bits=bits)  # type: ignore[arg-type]
