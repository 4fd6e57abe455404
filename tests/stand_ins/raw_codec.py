"""A lossless, fixed-size codec that copies, to compare compressed and native paths bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec, align


class Raw(Codec):
    """Copies the bytes."""

    name = "raw"
    lossless = True
    fixed_size = True

    @property
    def spec(self) -> str:
        return "raw"

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return align(numel * dtype.itemsize)

    def encode(self, values: Tensor, out: Tensor) -> int:
        data = values.view(torch.uint8)
        used = self.wire_nbytes(values.numel(), values.dtype)
        out[: data.numel()].copy_(data)
        out[data.numel() : used].zero_()
        return used

    def decode(self, payload: Tensor, out: Tensor) -> None:
        data = out.view(torch.uint8)
        data.copy_(payload[: data.numel()])

    def decode_add(self, payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
        values = torch.empty(out.numel(), dtype=dtype, device=out.device)
        self.decode(payload, values)
        out.add_(values)

    def element_bound(self, absmax: float, dtype: torch.dtype) -> float:
        return 0.0
