"""Adding 16-bit values into fp32: torch's result by faster kernels; encoders of planned slots."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridcomp.codecs import make_codec
from hybridcomp.codecs.blockint import BlockInt
from hybridcomp.collectives.wire.encoding import SlotCoder, add_values, coder_of, settle
from tests.collectives.common import DTYPES, values_of


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Compare bits, except for NaN payloads."""
    bits = first.view(torch.int32) == second.view(torch.int32)
    return bool((bits | (first.isnan() & second.isnan())).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 1003, 65536])
def test_adds_and_settles_as_torch_does(dtype: torch.dtype, numel: int) -> None:
    """Also in the middle of a tensor, at any offset."""
    for offset in (0, 1, 5):
        values = values_of(0, numel + offset, dtype)[offset:]
        total = values_of(1, numel + offset)[offset:]
        values[3::11] = torch.inf
        values[2::13] = torch.nan
        summed, left = total.clone(), total.clone()
        add_values(summed, values)
        assert same(summed, total + values.float())
        settle(left, values)
        expected = (total - values.float()).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        assert same(left, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numel", [1, 33, 5000])
@pytest.mark.parametrize("name", ["blockint", "zfp", "fp8"])
def test_kernels_that_were_looked_up_do_what_the_codec_does(
    name: str, numel: int, dtype: torch.dtype
) -> None:
    codec, cpu = make_codec(name), torch.device("cpu")
    coder, values = coder_of(codec, cpu), torch.randn(numel).to(dtype)
    assert isinstance(coder, SlotCoder) and coder.lossless is codec.lossless
    size = codec.wire_nbytes(numel, dtype)
    slots = torch.zeros(2, size, dtype=torch.uint8)
    assert coder.encode(values, slots[0]) == codec.encode(values, slots[1]) == size
    assert torch.equal(*slots)
    for held in (torch.full((2, numel), 3.0), torch.full((2, numel), 3.0).to(dtype)):
        coder.decode(slots[0], held[0])
        codec.decode(slots[0], held[1])
        assert torch.equal(*held)
    sums = torch.full((2, numel), 3.0)
    coder.decode_add(slots[0], sums[0], dtype)
    codec.decode_add(slots[0], sums[1], dtype)
    assert torch.equal(*sums)
    with pytest.raises(ValueError, match="short"):
        coder.encode(values, slots[0][:-16])
    with pytest.raises(ValueError, match="short"):
        coder.decode(slots[0][:-16], held[0])


def test_a_codec_that_does_more_than_its_kernels_is_asked_itself() -> None:
    class Noted(BlockInt):
        """Overrides an operation."""

        def decode_add(self, payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
            super().decode_add(payload, out, dtype)

    for codec in (Noted(), make_codec("bf16"), make_codec("expcode")):
        assert coder_of(codec, torch.device("cpu")) is codec
