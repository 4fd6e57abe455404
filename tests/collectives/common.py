"""Values that every rank can compute: all ranks' tensors, sums, bounds."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hybridcomp.codecs import make_codec
from hybridcomp.codecs.base import VALUE_DTYPES, Codec
from hybridcomp.collectives import chunk_ranges
from tests.stand_ins.plain_codecs import Identity, Int8, Trimmed, Wide

DTYPES = VALUE_DTYPES
LOSSLESS: tuple[Codec, ...] = (Identity(), Trimmed(), make_codec("mpc"), make_codec("expcode"))
LOSSY: tuple[Codec, ...] = (
    Int8(),
    Wide(),
    make_codec("bf16"),
    make_codec("fp8"),
    make_codec("zfp", rate=8.0),
    make_codec("blockint", bits=8),
    make_codec("blockint", bits=4),
    make_codec("radix", error_bound=1e-2),
    make_codec("radix", error_bound=1e-3, segment=256, mode="abs"),
)
CODECS = LOSSLESS + LOSSY
#: by day: payloads of fixed size, with and without kernels that plans look up, and of variable size
DAY = [codec for codec in CODECS if codec.spec in (
    "identity()", "expcode()", "int8()", "blockint(bits=4)", make_codec("radix").spec,
)]  # fmt: skip


def values_of(rank: int, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return a rank's values, with magnitudes that differ by rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (torch.randn(numel, generator=generator) * (rank + 1)).to(dtype)


def rank_order_sum(tensors: list[Tensor]) -> Tensor:
    """Sum in fp32 in rank order."""
    total = tensors[0].float()
    for tensor in tensors[1:]:
        total = total + tensor.float()
    return total


def bound(codec: Codec, tensors: list[Tensor], hops: int) -> float:
    """Return the largest error of the sum: each rank encoded once, the sum again with two hops.

    Includes rounding of fp32 sums and of a 16-bit result.
    """
    dtype = tensors[0].dtype
    peaks = [float(t.float().abs().max()) if t.numel() else 0.0 for t in tensors]
    error = sum(codec.element_bound(peak, dtype) for peak in peaks)
    if hops == 2:
        error += codec.element_bound(sum(peaks) + error, torch.float32)
    result = sum(peaks) + error
    return error + result * torch.finfo(dtype).eps + result * 2.0**-20


def nested_sum(values: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
    """Return the fp32 sum of a unit's ranks, level by level, in the order of summation."""
    for width in widths:
        values = [rank_order_sum(list(values[i : i + width])) for i in range(0, len(values), width)]
    (total,) = values
    return total


def check_levels(
    result: Tensor, codec: Codec, inputs: Sequence[Tensor], widths: Sequence[int], hops: int
) -> None:
    """Check the result: nested sums bit by bit if lossless, else the bound of the quantizations."""
    dtype, width = inputs[0].dtype, math.prod(widths)
    sums = [nested_sum(inputs[i : i + width], widths) for i in range(0, len(inputs), width)]
    if codec.lossless:
        exact = rank_order_sum([total.to(dtype) for total in sums])
        assert torch.equal(result.to(dtype), exact.to(dtype))
        return
    exact = rank_order_sum(sums)
    rounding = float(exact.abs().max()) * torch.finfo(dtype).eps if exact.numel() else 0.0
    error = float((result.float() - exact).abs().max()) if exact.numel() else 0.0
    assert error <= bound(codec, sums, hops) + rounding
    assert bound(codec, sums, hops) <= bound(codec, list(inputs), hops) * 1.001


def digest(*tensors: Tensor) -> str:
    """Hash the bits."""
    raw = b"".join(bytes(t.contiguous().view(torch.uint8).tolist()) for t in tensors)
    return hashlib.sha256(raw).hexdigest()


def all_reduce_wire(codec: Codec, numel: int, sent: torch.dtype, rank: int, ranks: int) -> int:
    """Return the bytes of an all_reduce with a fixed-size codec, in closed form."""
    if ranks == 2:
        return codec.wire_nbytes(numel, sent)
    sizes = [codec.wire_nbytes(b - a, sent) for a, b in chunk_ranges(numel, ranks)]
    return sum(sizes) - sizes[rank] + (ranks - 1) * max(sizes)
