"""Codecs in plain torch, as simple as the collectives allow."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec, align

BLOCK = 32


class Identity(Codec):
    """Copies the values' bytes: fixed size, lossless."""

    name = "identity"
    lossless = True
    fixed_size = True

    @property
    def spec(self) -> str:
        return "identity()"

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return align(numel * dtype.itemsize)

    def encode(self, values: Tensor, out: Tensor) -> int:
        raw = values.view(torch.uint8)
        used = self.wire_nbytes(values.numel(), values.dtype)
        out[: raw.numel()] = raw
        out[raw.numel() : used] = 0
        return used

    def decode(self, payload: Tensor, out: Tensor) -> None:
        out.view(torch.uint8).copy_(payload[: out.nbytes])

    def decode_add(self, payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
        decoded = out.new_empty(out.numel(), dtype=dtype)
        self.decode(payload, decoded)
        out.add_(decoded)

    def element_bound(self, absmax: float, dtype: torch.dtype) -> float:
        return 0.0


class Trimmed(Identity):
    """Lossless, variable size: an int64 length, then the bytes up to the last nonzero."""

    name = "trimmed"
    fixed_size = False

    @property
    def spec(self) -> str:
        return "trimmed()"

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return 16 + align(numel * dtype.itemsize) if numel else 0

    def encode(self, values: Tensor, out: Tensor) -> int:
        raw = values.view(torch.uint8)
        kept = int(raw.nonzero().max()) + 1 if raw.any() else 0
        used = 16 + align(kept)
        out[:used] = 0
        out[:8] = torch.tensor([kept]).view(torch.uint8)
        out[16 : 16 + kept] = raw[:kept]
        return used

    def decode(self, payload: Tensor, out: Tensor) -> None:
        kept = int(payload[:8].clone().view(torch.int64))
        # exactly the exchanged size
        assert payload.numel() == 16 + align(kept)
        raw = out.view(torch.uint8)
        raw[:kept] = payload[16 : 16 + kept]
        raw[kept:] = 0


class Int8(Codec):
    """One fp32 scale for 32 values, int8 each: fixed size, lossy, ignores the values' dtype."""

    name = "int8"
    lossless = False
    fixed_size = True

    @property
    def spec(self) -> str:
        return "int8()"

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        blocks = -(-numel // BLOCK)
        return align(blocks * (BLOCK + 4))

    def encode(self, values: Tensor, out: Tensor) -> int:
        blocks = -(-values.numel() // BLOCK)
        padded = torch.zeros(blocks * BLOCK)
        padded[: values.numel()] = values
        rows = padded.view(blocks, BLOCK)
        scales = rows.abs().amax(1, keepdim=True) / 127  # NaN and Inf propagate through the scale
        quantized = (rows / scales).nan_to_num(0.0).round().clamp(-127, 127).to(torch.int8)
        used = self.wire_nbytes(values.numel(), values.dtype)
        body = torch.cat([scales.view(torch.uint8), quantized.view(torch.uint8)], dim=1).view(-1)
        out[: body.numel()] = body
        out[body.numel() : used] = 0
        return used

    def decode(self, payload: Tensor, out: Tensor) -> None:
        out.copy_(self._decoded(payload, out.numel()))

    def decode_add(self, payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
        out.add_(self._decoded(payload, out.numel()))

    def element_bound(self, absmax: float, dtype: torch.dtype) -> float:
        return absmax / 254 * 1.001

    def _decoded(self, payload: Tensor, numel: int) -> Tensor:
        blocks = -(-numel // BLOCK)
        rows = payload[: blocks * (BLOCK + 4)].view(blocks, BLOCK + 4)
        scales = rows[:, :4].contiguous().view(torch.float32)
        values = rows[:, 4:].contiguous().view(torch.int8).float() * scales
        return values.view(-1)[:numel]


FIXED = Int8()


class Wide(Int8):
    """``Int8`` with payload lengths that depend on the values, like a guaranteed codec."""

    name = "wide"
    fixed_size = False

    @property
    def spec(self) -> str:
        return "wide()"

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return FIXED.wire_nbytes(numel, dtype) + 64 if numel else 0

    def encode(self, values: Tensor, out: Tensor) -> int:
        base = FIXED.encode(values, out)
        used = base + 16 * (int(values.float().abs().nan_to_num(0.0, 0.0).sum()) % 5)
        out[base:used] = 0
        return used
