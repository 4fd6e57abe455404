"""zfp: the stream is zfpy's, except for blocks that zfp would lose."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybridcomp.codecs import Zfp
from tests.codecs import arrays, reference
from tests.selection import by_day

RATES = tuple(quarter / 4 for quarter in range(10, 129))


def assert_is_zfpy(values: Tensor, rate: float) -> None:
    codec, floats = Zfp(rate=rate), values.float().numpy()
    assert arrays.encoded(codec, values).numpy().tobytes() == reference.zfp_encode(floats, rate)
    decoded = arrays.decoded(codec, values)
    expected = reference.zfp_decode(floats, rate)
    np.testing.assert_array_equal(decoded.numpy(), expected)
    lost = np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(decoded.numpy())[~lost], np.signbit(expected)[~lost])


@pytest.mark.parametrize("kind", by_day(arrays.KINDS, arrays.DAY))
def test_every_rate_and_kind(kind: str) -> None:
    for number, rate in enumerate(RATES):
        assert_is_zfpy(arrays.make(kind, 3 + number % 5, seed=number), rate)
        assert_is_zfpy(arrays.make(kind, 250 + number, seed=number), rate)


@given(values=arrays.tensors(), rate=st.floats(2.5, 32))
@arrays.often(80)
def test_any_values_at_any_rate(values: Tensor, rate: float) -> None:
    assert_is_zfpy(values, rate)


@pytest.mark.parametrize("rate", by_day([2.5, 8, 9, 9.25, 16, 32], [9.25]))
def test_long_arrays(rate: float) -> None:
    for kind in ("normal", "walk", "outliers"):
        assert_is_zfpy(arrays.make(kind, 20001, seed=1), rate)
