"""topk's CUDA kernels on values and places that only topk has: the CPU's bytes."""

from __future__ import annotations

import pytest
import torch

from hybridcomp.codecs.topk import TopK
from hybridcomp.errors import CodecError
from tests.codecs.test_topk import CODECS, INTEGERS, VALUES, encoded
from tests.kernels.cuda.common import kernels_replaced
from tests.kernels.cuda.emulated import KERNELS, check
from tests.kernels.cuda.sources import NIGHTLY
from tests.selection import by_day

LENGTHS = (1, 63, 4096, 4097, 12345)


@pytest.mark.parametrize("dtype", by_day(INTEGERS, [torch.bfloat16]), ids=str)
@pytest.mark.parametrize("kind", VALUES)
def test_bytes_are_the_cpus(kind: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    for codec in CODECS if NIGHTLY else CODECS[:3]:
        for numel in LENGTHS if NIGHTLY else LENGTHS[1::2]:
            check(codec, VALUES[kind](torch.randn(numel, generator=generator)).to(dtype))


@pytest.mark.nightly
def test_more_chunks_than_are_added_up_at_once() -> None:
    values = torch.randn(600 * 4096, generator=torch.Generator().manual_seed(2))
    values.view(-1, 4096)[5:200] = 0
    check(TopK(density=1 / 1024), values)


def test_places_far_apart() -> None:
    """Empty chunks between others, and more gaps than a block decodes."""
    values = torch.zeros(20 * 4096)
    values[3], values[-5] = 2.0, -1.0
    check(TopK(bits=8, density=1.0), values)


def test_damage_is_told_at_the_check() -> None:
    payload = encoded(TopK(density=0.01), torch.randn(9000))
    for place, byte in ((0, 255), (5, 255), (8, 1), (-20, 0)):
        broken = payload.clone()
        broken[place] = byte
        with kernels_replaced(KERNELS):
            TopK(density=0.01).decode(broken, torch.empty(9000))
        with pytest.raises(CodecError, match="damaged"):
            KERNELS.check()
