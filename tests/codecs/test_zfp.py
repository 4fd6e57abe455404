"""zfp: the stream is zfpy's, except for blocks that zfp would lose."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridcomp.codecs import Zfp
from hybridcomp.errors import CodecError
from tests.codecs import arrays, reference

RATES = tuple(quarter / 4 for quarter in range(10, 129))


def assert_is_zfpy(values: Tensor, rate: float) -> None:
    codec, floats = Zfp(rate=rate), values.float().numpy()
    payload = torch.empty(codec.wire_nbytes(values.numel(), values.dtype), dtype=torch.uint8)
    assert codec.encode(values, payload) == payload.numel()
    assert payload.numpy().tobytes() == reference.zfp_encode(floats, rate)
    decoded = torch.empty(values.numel())
    codec.decode(payload, decoded)
    expected = reference.zfp_decode(floats, rate)
    np.testing.assert_array_equal(decoded.numpy(), expected)
    lost = np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(decoded.numpy())[~lost], np.signbit(expected)[~lost])


@pytest.mark.parametrize("kind", arrays.KINDS)
def test_every_rate_and_kind(kind: str) -> None:
    for number, rate in enumerate(RATES):
        assert_is_zfpy(arrays.make(kind, 3 + number % 5, seed=number), rate)
        assert_is_zfpy(arrays.make(kind, 250 + number, seed=number), rate)


@given(values=arrays.tensors(), rate=st.floats(2.5, 32))
@settings(max_examples=200, deadline=None)
def test_any_values_at_any_rate(values: Tensor, rate: float) -> None:
    assert_is_zfpy(values, rate)


@pytest.mark.parametrize("rate", [2.5, 8, 9, 9.25, 16, 32])
def test_long_arrays(rate: float) -> None:
    for kind in ("normal", "walk", "outliers"):
        assert_is_zfpy(arrays.make(kind, 20001, seed=1), rate)


def test_values_that_zfp_swallows_are_kept_visible() -> None:
    values = torch.arange(1.0, 17.0)
    values[5], values[10] = float("nan"), float("inf")
    codec = Zfp(rate=16)
    payload = torch.empty(codec.wire_nbytes(16, torch.float32), dtype=torch.uint8)
    codec.encode(values, payload)
    decoded = torch.empty(16)
    codec.decode(payload, decoded)
    lost = torch.zeros(16, dtype=torch.bool)
    lost[4:12] = True
    assert torch.equal(decoded.isnan(), lost)
    assert torch.allclose(decoded[~lost], values[~lost], rtol=1e-2)


@pytest.mark.parametrize("rate", [1, 2.25, 32.5, float("nan"), "8", True])
def test_impossible_rates_are_refused(rate: object) -> None:
    with pytest.raises(CodecError, match="rate"):
        Zfp(rate=rate)  # type: ignore[arg-type]
