"""mpc: lossless on every bit pattern, and the stream of v1.2."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybridcomp.codecs import Mpc
from hybridcomp.errors import CodecError
from hybridcomp.kernels import DTYPE_CODES
from tests.codecs import arrays, reference


def words_of(values: Tensor) -> reference.Words:
    raw = values.view(torch.uint8).numpy().tobytes() if values.numel() else b""
    return np.frombuffer(raw + bytes(-len(raw) % 4), np.uint32)


@given(values=arrays.tensors(), dim=st.integers(1, 32))
@arrays.often(80)
def test_stream_is_the_reference_and_decodes_exactly(values: Tensor, dim: int) -> None:
    codec = Mpc(dim=dim)
    code = DTYPE_CODES[values.dtype]
    expected = reference.mpc_encode(words_of(values), values.numel(), dim, code)
    assert arrays.encoded(codec, values).numpy().tobytes() == expected
    decoded = arrays.decoded(codec, values, values.dtype)
    assert torch.equal(arrays.bits_of(decoded), arrays.bits_of(values))


def test_first_words_of_the_stream() -> None:
    payload = arrays.encoded(Mpc(dim=1), torch.arange(1, 33, dtype=torch.float32))
    head = (
        "63706d00 00000020 41f80000 ffff0000 0001ff00 ffff01f0 ffffff1c fffffff7 fffffffe ffffffff"
    )
    words = payload.numpy().view(np.uint32)
    assert [f"{word:08x}" for word in words] == [*head.split(), "00000000", "00000000"]


def test_zeros_shrink_to_the_bitmap() -> None:
    assert arrays.encoded(Mpc(), torch.zeros(2**16)).numel() <= 2**16 * 4 // 32 + 16


def test_another_dtype_count_or_dim_is_refused() -> None:
    payload = arrays.encoded(Mpc(), torch.randn(100))
    with pytest.raises(CodecError, match="another dtype or dim"):
        Mpc().decode(payload, torch.empty(100, dtype=torch.bfloat16))
    with pytest.raises(CodecError, match="another dtype or dim"):
        Mpc(dim=2).decode(payload, torch.empty(100))
    with pytest.raises(CodecError, match="number of values"):
        Mpc().decode(payload, torch.empty(99))


@given(data=st.data(), numel=st.integers(1, 3000), seed=st.integers(0, 2**31))
@arrays.often(30)
def test_a_cut_payload_is_refused(data: st.DataObject, numel: int, seed: int) -> None:
    payload = arrays.encoded(Mpc(), arrays.make("normal", numel, seed))
    # 12 bytes of padding, and an unused word of v1.2, may be cut without loss
    cut = data.draw(st.integers(0, max(0, payload.numel() - 17)))
    with pytest.raises(CodecError):
        Mpc().decode(payload[:cut].clone(), torch.empty(numel))
