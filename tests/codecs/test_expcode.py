"""expcode: bytes against the reference, exactness, and compression."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from torch import Tensor

from hybridcomp.codecs import VALUE_DTYPES, ExpCode, Mpc
from hybridcomp.errors import CodecError
from tests.codecs import arrays, expcode_reference
from tests.selection import by_day

CODEC = ExpCode()


def check(values: Tensor) -> None:
    assert arrays.encoded(CODEC, values).numpy().tobytes() == expcode_reference.encode(values)
    found = arrays.decoded(CODEC, values, values.dtype)
    assert torch.equal(arrays.bits_of(found), arrays.bits_of(values))


@given(values=arrays.tensors())
@arrays.often(40)
def test_bytes_are_those_of_the_reference_and_decode_exactly(values: Tensor) -> None:
    check(values)


@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
@pytest.mark.parametrize("kind", by_day(arrays.KINDS, arrays.DAY))
def test_whole_tiles_of_every_kind(kind: str, dtype: torch.dtype) -> None:
    check(arrays.make(kind, 2 * 2048 + 40, 3, dtype))


@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
def test_tiles_that_hide_their_exponents_from_the_sample(dtype: torch.dtype) -> None:
    """The sampled blocks have a single exponent, the others all: too many escapes, so width E."""
    values = arrays.make("bits", 2048, 0, dtype).view(64, 32)
    values[::4] = 1.5
    check(values.reshape(-1))
    nbytes = 2048 * dtype.itemsize
    assert nbytes < arrays.encoded(CODEC, values.reshape(-1)).numel() < nbytes + 64


@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
def test_zeros_between_values_have_a_code(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2**16, generator=generator)
    values[torch.rand(2**16, generator=generator) < 0.5] = 0
    check(values[:5000].to(dtype))
    dense = arrays.encoded(CODEC, torch.randn(2**16, generator=generator).to(dtype)).numel()
    assert arrays.encoded(CODEC, values.to(dtype)).numel() < 1.02 * dense


def test_sizes() -> None:
    values = torch.randn(2**18, generator=torch.Generator().manual_seed(0))
    for dtype, bits in ((torch.bfloat16, 11.3), (torch.float16, 14.3), (torch.float32, 27.3)):
        payload = arrays.encoded(CODEC, values.to(dtype))
        assert payload.numel() * 8 / 2**18 < bits
        assert payload.numel() < 0.97 * arrays.encoded(Mpc(), values.to(dtype)).numel()


@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
def test_rows_of_zeros_are_nearly_free(dtype: torch.dtype) -> None:
    rows = torch.zeros(2048, 256)
    generator = torch.Generator().manual_seed(0)
    touched = torch.randperm(2048, generator=generator)[:123]
    rows[touched] = torch.randn(123, 256, generator=generator)
    values = rows.view(-1).to(dtype)
    check(values[: 3 * 2048])
    assert arrays.encoded(CODEC, values).numel() * 10 < values.numel() * dtype.itemsize


def test_widened_bf16_values_lose_their_low_halves() -> None:
    values = torch.randn(2**16, generator=torch.Generator().manual_seed(0)).bfloat16()
    check(values[:5000].float())
    assert arrays.encoded(CODEC, values.float()).numel() == arrays.encoded(CODEC, values).numel()
    mixed = values[:4096].float()
    mixed[3000] = 1.0000001
    check(mixed)


def test_damaged_payloads_are_refused() -> None:
    values = arrays.make("outliers", 5000, 0)
    payload = arrays.encoded(CODEC, values)
    out = torch.empty_like(values)
    for place, message in ((0, "not one of"), (4, "version"), (8, "number of values"),
                           (16, "another length"), (24, "too short|damaged"), (32, "damaged"),
                           (44 + 1, "damaged"), (44 + 3, "damaged")):  # fmt: skip
        bad = payload.clone()
        bad[place] = 0x77
        with pytest.raises(CodecError, match=message):
            CODEC.decode(bad, out)
    with pytest.raises(CodecError, match="another dtype"):
        CODEC.decode(payload, torch.empty(5000, dtype=torch.bfloat16))
    with pytest.raises(CodecError, match="another dtype"):
        CODEC.decode_add(payload, out, torch.float16)
    with pytest.raises(CodecError, match="too short"):
        CODEC.decode(payload[:-64], out)
