"""mpc: lossless on every bit pattern, and the stream of v1.2."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridcomp.codecs import Mpc
from hybridcomp.errors import CodecError
from hybridcomp.kernels import DTYPE_CODES
from tests.codecs import arrays, reference


def encoded(codec: Mpc, values: Tensor) -> Tensor:
    room = torch.empty(codec.wire_nbytes(values.numel(), values.dtype), dtype=torch.uint8)
    return room[: codec.encode(values, room)]


def words_of(values: Tensor) -> reference.Words:
    raw = values.view(torch.uint8).numpy().tobytes() if values.numel() else b""
    return np.frombuffer(raw + bytes(-len(raw) % 4), np.uint32)


@given(values=arrays.tensors(), dim=st.integers(1, 32))
@settings(max_examples=200, deadline=None)
def test_stream_is_the_reference_and_decodes_exactly(values: Tensor, dim: int) -> None:
    codec = Mpc(dim=dim)
    payload = encoded(codec, values)
    expected = reference.mpc_encode(
        words_of(values), values.numel(), dim, DTYPE_CODES[values.dtype]
    )
    assert payload.numpy().tobytes() == expected
    decoded = torch.empty_like(values)
    codec.decode(payload, decoded)
    assert torch.equal(arrays.bits_of(decoded), arrays.bits_of(values))


@pytest.mark.parametrize(
    ("numel", "dim", "words", "digest"),
    [
        (1024, 1, 484, "fcf151187c1dc635"),
        (2048, 2, 985, "b0ad5002e8ed3654"),
        (5000, 3, 3354, "beb5a2071f4985bd"),
        (65536, 1, 31232, "75ecb69a402158bb"),
    ],
)
def test_vectors_of_an_independent_model(numel: int, dim: int, words: int, digest: str) -> None:
    """x = (i * 2654435761) mod 2^32, through a NumPy model written from v1.2's kernels."""
    x = (np.arange(numel, dtype=np.uint64) * 2654435761 & 0xFFFFFFFF).astype(np.uint32)
    payload = encoded(Mpc(dim=dim), torch.from_numpy(x.view(np.float32)))
    assert payload.numel() == -(-words * 4 // 16) * 16
    assert hashlib.sha256(payload[: words * 4].numpy().tobytes()).hexdigest()[:16] == digest


def test_first_words_of_the_stream() -> None:
    payload = encoded(Mpc(dim=1), torch.arange(1, 33, dtype=torch.float32))
    head = (
        "63706d00 00000020 41f80000 ffff0000 0001ff00 ffff01f0 ffffff1c fffffff7 fffffffe ffffffff"
    )
    words = payload.numpy().view(np.uint32)
    assert [f"{word:08x}" for word in words] == [*head.split(), "00000000", "00000000"]


def test_every_16_bit_pattern() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        values, decoded = bits.view(dtype), torch.empty(2**16, dtype=dtype)
        Mpc().decode(encoded(Mpc(), values), decoded)
        assert torch.equal(decoded.view(torch.int16), bits)


def test_zeros_shrink_to_the_bitmap() -> None:
    assert encoded(Mpc(), torch.zeros(2**16)).numel() <= 2**16 * 4 // 32 + 16


def test_another_dtype_count_or_dim_is_refused() -> None:
    payload = encoded(Mpc(), torch.randn(100))
    with pytest.raises(CodecError, match="another dtype or dim"):
        Mpc().decode(payload, torch.empty(100, dtype=torch.bfloat16))
    with pytest.raises(CodecError, match="another dtype or dim"):
        Mpc(dim=2).decode(payload, torch.empty(100))
    with pytest.raises(CodecError, match="number of values"):
        Mpc().decode(payload, torch.empty(99))


@given(data=st.data(), numel=st.integers(1, 3000), seed=st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_a_cut_payload_is_refused(data: st.DataObject, numel: int, seed: int) -> None:
    payload = encoded(Mpc(), arrays.make("normal", numel, seed))
    # 12 bytes of padding, and an unused word of v1.2, may be cut without loss
    cut = data.draw(st.integers(0, max(0, payload.numel() - 17)))
    with pytest.raises(CodecError):
        Mpc().decode(payload[:cut].clone(), torch.empty(numel))


@pytest.mark.parametrize("dim", [0, 33, -1, 1.0, True, "1"])
def test_impossible_dims_are_refused(dim: object) -> None:
    with pytest.raises(CodecError, match="dim"):
        Mpc(dim=dim)  # type: ignore[arg-type]
