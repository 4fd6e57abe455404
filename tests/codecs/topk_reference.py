"""topk by torch functions: the kernels' oracle."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybridcomp.codecs.base import align
from hybridcomp.codecs.topk import CHUNK, HEADER, TopK
from hybridcomp.errors import CodecError

#: magnitudes have levels from LOW to LOW + WIDTH times the scale
LOW, WIDTH = 0.8, 0.6


def encoded(codec: TopK, values: Tensor) -> Tensor:
    """Return the payload of nonempty ``values``, uint8 on their device."""
    wide = values.detach().float()
    places, scales = _choose(codec, wide)
    chosen, scale = wide[places], scales.float()[places // CHUNK]
    level = ((chosen.abs() / scale - LOW) * (_levels(codec) / WIDTH)).floor()
    code = level.clamp(0, _levels(codec) - 1).to(torch.int64) * 2 + (chosen < 0)
    gaps = torch.diff(places, prepend=places.new_full((1,), -1)) - 1
    high = gaps >> codec._rice
    unary = torch.zeros(int(high.sum()) + len(places), dtype=torch.uint8, device=values.device)
    unary[(high + 1).cumsum(0) - 1] = 1
    head = torch.tensor(
        [len(places), len(unary), values.numel(), 0], dtype=torch.int32, device=values.device
    )
    sections = [
        head.view(torch.uint8), scales.view(torch.uint8),
        _packed(_bits(gaps & ((1 << codec._rice) - 1), codec._rice)),
        _packed(_bits(code, codec.bits)), _packed(unary),
    ]  # fmt: skip
    payload = torch.cat(sections)
    return torch.nn.functional.pad(payload, (0, align(payload.numel()) - payload.numel()))


def _levels(codec: TopK) -> int:
    return 1 << (codec.bits - 1)


def _choose(codec: TopK, wide: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of the kept values, ascending, and the scale of each chunk.

    Keeps the first of equal values, so that bytes do not depend on the device.
    """
    chunks = -(-wide.numel() // CHUNK)
    table = torch.nn.functional.pad(wide.abs(), (0, chunks * CHUNK - wide.numel()))
    table = table.view(chunks, CHUNK)
    broken = ~table.isfinite().all(dim=1)
    table = table.masked_fill(broken[:, None], 0.0)
    most = torch.full((chunks,), codec._kept(CHUNK), device=wide.device)
    most[-1] = codec._kept(wide.numel() - (chunks - 1) * CHUNK)
    largest = table.topk(int(most.max()), dim=1).values
    least = largest.gather(1, (most - 1)[:, None])
    above, equal = table > least, table == least
    room = most[:, None] - above.sum(dim=1, keepdim=True)
    kept = (above | (equal & (equal.cumsum(dim=1) <= room))) & (table > 0)
    middle = ((kept.sum(dim=1) - 1) // 2).clamp(min=0)
    scales = largest.gather(1, middle[:, None]).squeeze(1).to(torch.bfloat16)
    kept &= (scales > 0)[:, None]  # a chunk whose scale rounds to 0 in bf16 keeps nothing
    scales[broken] = math.nan
    return kept.view(-1).nonzero().view(-1), scales


def decoded(codec: TopK, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """Return ``numel`` values in fp32, none above the largest of ``dtype``."""
    kept, unary, told, _ = payload[:HEADER].clone().view(torch.int32).tolist()
    chunks = -(-numel // CHUNK)
    lengths = [2 * chunks, *(-(-n // 8) for n in (kept * codec._rice, kept * codec.bits, unary))]
    fits = told == numel and 0 <= kept <= min(numel, unary)
    if not fits or HEADER + sum(lengths) > payload.numel():
        raise CodecError(f"{codec.spec}: cannot decode {numel} values: damaged, or of others")
    scales, low, codes, ones = torch.split(payload[HEADER : HEADER + sum(lengths)], lengths)
    scale = scales.clone().view(torch.bfloat16).float()
    ends = _unpacked(ones)[:unary].nonzero().view(-1)
    if len(ends) != kept:
        raise CodecError(f"{codec.spec}: cannot decode {numel} values: damaged places")
    high = torch.diff(ends, prepend=ends.new_full((1,), -1)) - 1
    gaps = (high << codec._rice) + _numbers(_unpacked(low), kept, codec._rice)
    places = (gaps + 1).cumsum(0) - 1
    if kept and int(places[-1]) >= numel:
        raise CodecError(f"{codec.spec}: cannot decode {numel} values: damaged places")
    code = _numbers(_unpacked(codes), kept, codec.bits)
    size = ((code >> 1) + 0.5) * (WIDTH / _levels(codec)) + LOW
    values = size.float() * scale[places // CHUNK]
    values = values.clamp(max=torch.finfo(dtype).max)
    found = torch.zeros(numel, device=payload.device)
    found[places] = torch.where((code & 1).bool(), -values, values)
    broken = scale.isnan().repeat_interleave(CHUNK)[:numel]
    return found.masked_fill_(broken, math.nan)


def _bits(numbers: Tensor, width: int) -> Tensor:
    """Return the bits of ``numbers``, ``width`` each, lowest first: 1-D uint8."""
    shifts = torch.arange(width, device=numbers.device)
    return ((numbers[:, None] >> shifts) & 1).to(torch.uint8).view(-1)


def _packed(bits: Tensor) -> Tensor:
    """Pack bits into bytes, lowest first; zeros fill the last."""
    padded = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
    weights = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=bits.device)
    return (padded * weights).sum(dim=1, dtype=torch.uint8)


def _unpacked(packed: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & 1).view(-1)


def _numbers(bits: Tensor, count: int, width: int) -> Tensor:
    """Return ``count`` numbers of ``width`` bits as int64, the inverse of ``_bits``."""
    if not width:
        return torch.zeros(count, dtype=torch.int64, device=bits.device)
    shifts = torch.arange(width, device=bits.device)
    return (bits[: count * width].view(count, width).to(torch.int64) << shifts).sum(dim=1)
