"""Other people's formats, emulated: what they decode to and how many bits they would send.

Bit counts leave out message headers, which a real message would have once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from hybridcomp.codecs import Codec

#: bits per value, relative L2 error
Point = tuple[float, float]

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


def relative_error(values: Tensor, decoded: Tensor) -> float:
    """|decoded - values| / |values|, in the 2-norm."""
    values = values.double()
    return float((decoded.double() - values).norm() / values.norm())


def codec_point(codec: Codec, values: Tensor) -> Point:
    """One of our codecs, measured on its real payload."""
    room = torch.empty(codec.wire_nbytes(values.numel(), values.dtype), dtype=torch.uint8)
    payload = room[: codec.encode(values, room)]
    decoded = torch.empty_like(values)
    codec.decode(payload, decoded)
    return payload.numel() * 8 / values.numel(), relative_error(values, decoded)


def rows_of(values: Tensor, width: int) -> Tensor:
    """(blocks, width), filled up with zeros."""
    rows = torch.zeros(-(-len(values) // width) * width)
    rows[: len(values)] = values
    return rows.view(-1, width)


def cuszp_point(values: Tensor, bound: float, segment: int) -> Point:
    """cuSZp's fixed mode: blocks of 32, a byte of width each, signs and magnitude planes.

    One step per segment, relative to its absmax, as radix has.
    """
    segments = rows_of(values, segment)
    step = 2 * bound * segments.abs().amax(1, keepdim=True).clamp_min(1e-30)
    levels = (segments / step).round()
    decoded = (levels * step).view(-1)[: len(values)]
    top = rows_of(levels.view(-1)[: len(values)], 32).abs().amax(1)
    width = torch.where(top > 0, torch.floor(torch.log2(top.clamp_min(1))) + 1, 0)
    bits = 8 + torch.where(width > 0, 32 * (1 + width), 0)
    total = float(bits.sum()) + 32 * len(segments)
    return total / len(values), relative_error(values, decoded)


def _mx_scale(rows: Tensor, largest_exponent: int) -> Tensor:
    """OCP MX: the shared power of two of each row (e8m0)."""
    exponent = torch.floor(torch.log2(rows.abs().amax(1, keepdim=True).clamp_min(2.0**-100)))
    return torch.exp2(exponent - largest_exponent)


def _small_float(values: Tensor, exponents: int, mantissa: int, largest: float) -> Tensor:
    """Round to nearest in a tiny float with saturation."""
    bias = 2 ** (exponents - 1) - 1
    exponent = torch.floor(torch.log2(values.abs().clamp_min(1e-30))).clamp_min(1 - bias)
    unit = torch.exp2(exponent - mantissa)
    return ((values / unit).round() * unit).clamp(-largest, largest)


def mx_point(values: Tensor, exponents: int, mantissa: int, largest: float) -> Point:
    """An MX format: blocks of 32 under a power of two."""
    rows = rows_of(values, 32)
    largest_exponent = int(torch.floor(torch.log2(torch.tensor(largest))))
    scale = _mx_scale(rows, largest_exponent)
    decoded = _small_float(rows / scale, exponents, mantissa, largest) * scale
    bits = 1 + exponents + mantissa + 8 / 32
    return bits, relative_error(values, decoded.view(-1)[: len(values)])


@lru_cache(maxsize=1)
def dynamic_map() -> Tensor:
    """The 256 signed levels of bitsandbytes' 8-bit dynamic map (Dettmers, arXiv 1511.04561)."""
    levels = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1)
        means = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (i - 6)).tolist()
        levels += means + [-mean for mean in means]
    return torch.tensor(sorted(levels))


def codebook_point(values: Tensor, levels: Tensor, block: int) -> Point:
    """bitsandbytes: the nearest level under an fp32 absmax per block."""
    rows = rows_of(values, block)
    absmax = rows.abs().amax(1, keepdim=True).clamp_min(1e-30)
    edges = (levels[1:] + levels[:-1]) / 2
    decoded = levels[torch.bucketize(rows / absmax, edges)] * absmax
    bits = (len(levels) - 1).bit_length() + 32 / block
    return bits, relative_error(values, decoded.view(-1)[: len(values)])


PEERS: dict[str, Callable[[Tensor], Point]] = {
    "mxfp8 e4m3": lambda values: mx_point(values, 4, 3, 448.0),
    "mxfp6 e2m3": lambda values: mx_point(values, 2, 3, 7.5),
    "mxfp4 e2m1": lambda values: mx_point(values, 2, 1, 6.0),
    "bnb int8 b256": lambda values: codebook_point(values, dynamic_map(), 256),
    "bnb nf4 b64": lambda values: codebook_point(values, torch.tensor(NF4), 64),
}
