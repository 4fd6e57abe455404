"""bf16, fp16 and fp8 against torch's own conversions."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybridcomp.codecs import Bf16, Fp16, make_codec
from hybridcomp.collectives.wire.encoding import add_values
from tests.codecs import arrays

CASTS = {torch.bfloat16: Bf16(), torch.float16: Fp16()}
FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """torch's conversion, with finite values clamped to the finite range of ``dtype``."""
    limit = torch.finfo(dtype).max
    clamped = torch.where(values.isfinite(), values.float().clamp(-limit, limit), values.float())
    return clamped.to(dtype)


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    lost = expected.isnan()
    assert torch.equal(found.signbit()[~lost], expected.signbit()[~lost])


@given(values=arrays.tensors(), target=st.sampled_from(list(CASTS)))
@arrays.often(80)
def test_casts_are_torchs_with_saturation(values: Tensor, target: torch.dtype) -> None:
    codec = CASTS[target]
    payload = arrays.encoded(codec, values)
    assert not payload[2 * values.numel() :].any()
    stored = payload[: 2 * values.numel()].view(target)
    assert_same(stored, saturated(values, target))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        decoded = torch.empty(values.numel(), dtype=dtype)
        codec.decode(payload, decoded)
        assert_same(decoded, saturated(stored, dtype))


@given(values=arrays.tensors())
@arrays.often(50)
def test_sums_are_torchs(values: Tensor) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        total = torch.linspace(-3, 5, values.numel())
        expected = total.add(values.to(dtype))
        add_values(total, values.to(dtype))
        assert_same(total, expected)


def test_every_16_bit_pattern_widens_as_torch_does() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    for dtype, codec in CASTS.items():
        decoded = torch.empty(2**16)
        codec.decode(bits.view(torch.uint8), decoded)
        assert_same(decoded, bits.view(dtype).float())


@given(values=arrays.tensors(), name=st.sampled_from(list(FLOAT8)))
@arrays.often(80)
def test_fp8_is_torchs_on_scaled_blocks(values: Tensor, name: str) -> None:
    codec, numel = make_codec("fp8", format=name), values.numel()
    payload = arrays.encoded(codec, values)
    levels = payload[:numel].view(FLOAT8[name])
    blocks = -(-numel // 4096)
    start = -(-numel // 4) * 4
    scales = payload[start : start + 4 * blocks].numpy().view(np.float32)
    assert not payload[numel:start].any() and not payload[start + 4 * blocks :].any()
    largest = torch.tensor(torch.finfo(FLOAT8[name]).max)
    decoded = torch.empty(numel)
    codec.decode(payload, decoded)
    for block in range(blocks):
        here = slice(4096 * block, 4096 * (block + 1))
        floats = values[here].float()
        finite = floats.isfinite()
        absmax = floats[finite].abs().amax() if finite.any() else torch.tensor(0.0)
        absmax = torch.maximum(absmax, torch.tensor(2.0**-90))
        assert scales[block] == absmax.item()
        scaled = torch.where(finite, floats * (largest / absmax), torch.nan)
        assert_same(levels[here].float(), scaled.to(FLOAT8[name]).float())
        limit = torch.finfo(torch.float32).max
        expected = (levels[here].float() * (absmax * (1 / largest))).clamp(-limit, limit)
        assert_same(decoded[here], expected)
