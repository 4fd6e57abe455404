"""topk: the largest values of every 4096, in few bits, with their places entropy-coded.

For deltas whose rest error feedback sends later (Sarfi et al. 2025, SparseLoCo). The payload stands
at the top of ``kernels/formats/topk.h``.

On a CPU kernels do it (``kernels/cpu/cpu_topk.cpp``), on other devices functions of torch, in the
same bytes. Gaps are geometric where the largest values lie anywhere, for which Rice's code is
within a few percent of the entropy: at a density of 1/64 and 2 bits a message has 0.153 bits a
value.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec, align
from hybridcomp.codecs.checks import check_add, check_decode, check_dtype, check_encode
from hybridcomp.codecs.setting import Setting
from hybridcomp.errors import CodecError
from hybridcomp.kernels import DTYPE_CODES, on_host

CHUNK = 4096
HEADER = 16
#: magnitudes lie on levels from LOW to LOW + WIDTH times the scale
LOW, WIDTH = 0.8, 0.6


class TopK(Codec):
    """Lossy codec of variable size that keeps a share ``density`` of the values."""

    name: ClassVar[str] = "topk"
    about: ClassVar[str] = "the largest values alone, with their places"
    settings = (
        Setting("bits", int, "topk: bits of a value that is kept, 2 (default) to 8.", 2, 8),
        Setting(
            "density", float, "topk: share of the values that is kept, by default 0.015625.",
            1 / CHUNK, 1.0,
        ),
    )  # fmt: skip
    sparse: ClassVar[bool] = True
    lossless = False
    fixed_size = False
    span: ClassVar[int] = CHUNK
    segment = CHUNK

    def __init__(self, bits: int = 2, density: float = 1 / 64) -> None:
        self.check_settings(bits=bits, density=density)
        self.bits, self.density = bits, float(density)
        self._rice = max(0, math.floor(math.log2(max(1.0, math.log(2) / density))))

    @property
    def spec(self) -> str:
        return f"topk(bits={self.bits}, density={self.density:g})"

    def _kept(self, numel: int) -> int:
        """Return how many of ``numel`` values of one chunk are kept at most."""
        return min(numel, max(1, round(numel * self.density)))

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        check_dtype(self.spec, dtype)
        if numel == 0:
            return 0
        whole, rest = divmod(numel, CHUNK)
        kept = whole * self._kept(CHUNK) + (self._kept(rest) if rest else 0)
        unary = kept + (numel >> self._rice)
        sections = (kept * self._rice, kept * self.bits, unary)
        return align(HEADER + 2 * -(-numel // CHUNK) + sum(-(-bits // 8) for bits in sections))

    def bits_per_value(self, dtype: torch.dtype) -> float:
        """Return the bits a value where the largest lie anywhere."""
        quotient = 1 / (1 - (1 - self.density) ** (1 << self._rice)) if self.density < 1 else 1.0
        return self.density * (self._rice + self.bits + quotient) + 16 / CHUNK

    def encode(self, values: Tensor, out: Tensor) -> int:
        nbytes = self.wire_nbytes(values.numel(), values.dtype)
        check_encode(self.spec, values, out, nbytes)
        if not values.numel():
            return 0
        if values.device.type != "cpu":
            payload = self.encoded_by_torch(values)
            out[: payload.numel()] = payload
            return payload.numel()
        used: int = on_host("topk").encode(
            *self._settings(values.numel()), DTYPE_CODES[values.dtype], values.data_ptr(),
            values.numel(), out.data_ptr(), nbytes, torch.get_num_threads(),
        )  # fmt: skip
        return used

    def decode(self, payload: Tensor, out: Tensor) -> None:
        check_decode(self.spec, payload, out, HEADER if out.numel() else 0)
        if out.device.type == "cpu":
            self._decode(payload, out, add=False)
        elif out.numel():
            out.copy_(self.decoded_by_torch(payload, out.numel(), out.dtype))

    def decode_add(self, payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
        check_add(self.spec, out, dtype)
        check_decode(self.spec, payload, out, HEADER if out.numel() else 0)
        if out.device.type == "cpu":
            self._decode(payload, out, add=True)
        elif out.numel():
            out.add_(self.decoded_by_torch(payload, out.numel(), torch.float32))

    def element_bound(self, absmax: float, dtype: torch.dtype) -> float:
        check_dtype(self.spec, dtype)
        return absmax * 1.01

    def _settings(self, numel: int) -> tuple[int, int, int, int]:
        """Return the first arguments of the kernels."""
        last = (numel - 1) % CHUNK + 1
        return self.bits, self._rice, self._kept(CHUNK), self._kept(last)

    def _decode(self, payload: Tensor, out: Tensor, *, add: bool) -> None:
        if not out.numel():
            return
        try:
            on_host("topk").decode(
                *self._settings(out.numel()), DTYPE_CODES[out.dtype], payload.data_ptr(),
                payload.numel(), out.data_ptr(), out.numel(), add, torch.get_num_threads(),
            )  # fmt: skip
        except ValueError as error:
            raise CodecError(f"{self.spec}: cannot decode {out.numel()} values: {error}") from error

    # by torch, on devices without kernels

    def encoded_by_torch(self, values: Tensor) -> Tensor:
        """Return the payload of ``values``, which are not empty: uint8 on their device."""
        wide = values.detach().float()
        places, scales = self._choose(wide)
        chosen, scale = wide[places], scales.float()[places // CHUNK]
        level = ((chosen.abs() / scale - LOW) * (self._levels / WIDTH)).floor()
        code = level.clamp(0, self._levels - 1).to(torch.int64) * 2 + (chosen < 0)
        gaps = torch.diff(places, prepend=places.new_full((1,), -1)) - 1
        high = gaps >> self._rice
        unary = torch.zeros(int(high.sum()) + len(places), dtype=torch.uint8, device=values.device)
        unary[(high + 1).cumsum(0) - 1] = 1
        head = torch.tensor(
            [len(places), len(unary), values.numel(), 0], dtype=torch.int32, device=values.device
        )
        sections = [
            head.view(torch.uint8), scales.view(torch.uint8),
            _packed(_bits(gaps & ((1 << self._rice) - 1), self._rice)),
            _packed(_bits(code, self.bits)), _packed(unary),
        ]  # fmt: skip
        payload = torch.cat(sections)
        return torch.nn.functional.pad(payload, (0, align(payload.numel()) - payload.numel()))

    @property
    def _levels(self) -> int:
        return 1 << (self.bits - 1)

    def _choose(self, wide: Tensor) -> tuple[Tensor, Tensor]:
        """Return the places of the values kept, ascending, and the scale of each chunk.

        Of equal values the first are kept, so that bytes do not depend on the device.
        """
        chunks = -(-wide.numel() // CHUNK)
        table = torch.nn.functional.pad(wide.abs(), (0, chunks * CHUNK - wide.numel()))
        table = table.view(chunks, CHUNK)
        broken = ~table.isfinite().all(dim=1)
        table = table.masked_fill(broken[:, None], 0.0)
        most = torch.full((chunks,), self._kept(CHUNK), device=wide.device)
        most[-1] = self._kept(wide.numel() - (chunks - 1) * CHUNK)
        largest = table.topk(int(most.max()), dim=1).values
        least = largest.gather(1, (most - 1)[:, None])
        above, equal = table > least, table == least
        room = most[:, None] - above.sum(dim=1, keepdim=True)
        kept = (above | (equal & (equal.cumsum(dim=1) <= room))) & (table > 0)
        middle = ((kept.sum(dim=1) - 1) // 2).clamp(min=0)
        scales = largest.gather(1, middle[:, None]).squeeze(1).to(torch.bfloat16)
        kept &= (scales > 0)[:, None]  # a scale that bf16 rounds to 0 keeps nothing
        scales[broken] = math.nan
        return kept.view(-1).nonzero().view(-1), scales

    def decoded_by_torch(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return ``numel`` values in fp32, none above the largest of ``dtype``."""
        kept, unary, told, _ = payload[:HEADER].clone().view(torch.int32).tolist()
        chunks = -(-numel // CHUNK)
        lengths = [2 * chunks, *(-(-n // 8) for n in (kept * self._rice, kept * self.bits, unary))]
        fits = told == numel and 0 <= kept <= min(numel, unary)
        if not fits or HEADER + sum(lengths) > payload.numel():
            raise CodecError(f"{self.spec}: cannot decode {numel} values: damaged, or of others")
        scales, low, codes, ones = torch.split(payload[HEADER : HEADER + sum(lengths)], lengths)
        scale = scales.clone().view(torch.bfloat16).float()
        ends = _unpacked(ones)[:unary].nonzero().view(-1)
        if len(ends) != kept:
            raise CodecError(f"{self.spec}: cannot decode {numel} values: damaged places")
        high = torch.diff(ends, prepend=ends.new_full((1,), -1)) - 1
        gaps = (high << self._rice) + _numbers(_unpacked(low), kept, self._rice)
        places = (gaps + 1).cumsum(0) - 1
        if kept and int(places[-1]) >= numel:
            raise CodecError(f"{self.spec}: cannot decode {numel} values: damaged places")
        code = _numbers(_unpacked(codes), kept, self.bits)
        size = ((code >> 1) + 0.5) * (WIDTH / self._levels) + LOW
        values = size.float() * scale[places // CHUNK]
        values = values.clamp(max=torch.finfo(dtype).max)
        found = torch.zeros(numel, device=payload.device)
        found[places] = torch.where((code & 1).bool(), -values, values)
        broken = scale.isnan().repeat_interleave(CHUNK)[:numel]
        return found.masked_fill_(broken, math.nan)


def _bits(numbers: Tensor, width: int) -> Tensor:
    """Return the bits of ``numbers``, ``width`` of each, lowest first: 1-D uint8."""
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
