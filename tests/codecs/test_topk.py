"""topk: kernels against torch functions, bit for bit, and damaged payloads."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from hybridcomp.codecs.topk import TopK
from hybridcomp.errors import CodecError
from tests.codecs import arrays, topk_reference

CODECS = (
    TopK(), TopK(bits=5, density=0.2), TopK(bits=8, density=1.0), TopK(density=1 / 4096),
    TopK(bits=3, density=0.03),
)  # fmt: skip
VALUES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda normal: normal,
    "ties": lambda normal: normal.round(),
    "zeros": lambda normal: normal * 0,
    "few": lambda normal: torch.where(normal > 2.8, normal, 0.0),
    "denormals": lambda normal: (normal * 3).round() * 1e-41,
    "below a scale": lambda normal: normal.abs() * 1e-45,
    "large": lambda normal: normal * 1e38,
    "NaN": lambda normal: torch.where(normal > 3.0, torch.nan, normal),
    "Inf": lambda normal: torch.where(normal < -3.0, -torch.inf, normal),
}
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def bits_of(values: Tensor) -> Tensor:
    """Return the bits, with NaNs unified: torch has several in bf16."""
    return values.view(INTEGERS[values.dtype]).masked_fill(values.isnan(), -1)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("kind", VALUES)
def test_kernels_and_torch_agree_to_the_bit(kind: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    for codec in CODECS:
        for numel in (1, 63, 4096, 4097, 12345):
            normal = torch.randn(numel, generator=generator)
            values = VALUES[kind](normal).to(dtype)
            payload = arrays.encoded(codec, values)
            assert torch.equal(payload, topk_reference.encoded(codec, values)), (codec, numel)
            found, expected = torch.empty_like(values), torch.empty_like(values)
            codec.decode(payload, found)
            expected.copy_(topk_reference.decoded(codec, payload, numel, dtype))
            assert torch.equal(bits_of(found), bits_of(expected)), (codec, numel)
            total = torch.randn(numel, generator=generator)
            wanted = total + topk_reference.decoded(codec, payload, numel, torch.float32)
            codec.decode_add(payload, total, dtype)
            torch.testing.assert_close(total, wanted, rtol=0, atol=0, equal_nan=True)


def test_a_damaged_payload_is_an_error_or_values_and_never_a_crash() -> None:
    codec, values = TopK(density=0.01), torch.randn(9000)
    payload, out = arrays.encoded(codec, values), torch.empty(9000)
    for place, byte in ((0, 255), (5, 255), (8, 1), (-20, 0)):  # kept, unary, numel, ones
        broken = payload.clone()
        broken[place] = byte
        with pytest.raises(CodecError, match="damaged"):
            codec.decode(broken, out)
    with pytest.raises(CodecError, match="damaged"):
        codec.decode(payload[: payload.numel() // 2], out)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        broken = payload.clone()
        places = torch.randint(0, payload.numel(), (3,), generator=generator)
        broken[places] = torch.randint(0, 256, (3,), generator=generator, dtype=torch.uint8)
        try:
            codec.decode(broken, out)
        except CodecError as error:
            assert "\n" not in str(error)
