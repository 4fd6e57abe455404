"""topk: the largest of every 4096 values, in few bits, with their positions entropy-coded.

It is for deltas with error feedback, which sends the other values later (Sarfi et al. 2025,
SparseLoCo). The payload is described at the top of ``kernels/formats/topk.h``.

If the positions of the largest values are random, the gaps between them follow a geometric
distribution, and Rice's code comes within a few percent of their entropy: at a density of 1/64 and
2 bits per kept value, a message takes 0.153 bits per value of the tensor.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from hybridcomp.codecs._variable import VariableCodec
from hybridcomp.codecs.base import align
from hybridcomp.codecs.checks import check_dtype
from hybridcomp.codecs.setting import Setting
from hybridcomp.kernels import KernelSet, VariableKernels

CHUNK = 4096
HEADER = 16


class TopK(VariableCodec):
    """Lossy codec of variable size that keeps the fraction ``density`` of the values."""

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
    kernels = KernelSet[VariableKernels](name)
    lossless = False
    block_size: int = CHUNK
    segment = CHUNK

    def __init__(self, bits: int = 2, density: float = 1 / 64) -> None:
        self.check_settings(bits=bits, density=density)
        self.bits, self.density = bits, float(density)
        self._rice = max(0, math.floor(math.log2(max(1.0, math.log(2) / density))))

    @property
    def spec(self) -> str:
        return f"topk(bits={self.bits}, density={self.density:g})"

    def _kept(self, numel: int) -> int:
        """Return how many values of a chunk of ``numel`` values are kept at most."""
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
        """Return the bits a value if the positions of the largest values are random."""
        quotient = 1 / (1 - (1 - self.density) ** (1 << self._rice)) if self.density < 1 else 1.0
        return self.density * (self._rice + self.bits + quotient) + 16 / CHUNK

    def element_bound(self, absmax: float, dtype: torch.dtype) -> float:
        check_dtype(self.spec, dtype)
        return absmax * 1.01

    @property
    def _settings(self) -> tuple[int, ...]:
        return self.bits, self._rice

    def _settings_for(self, numel: int) -> tuple[int, ...]:
        """Return: bits of a kept value, low bits of a gap, values kept of a whole chunk, and values
        kept of the last chunk.
        """
        last = (numel - 1) % CHUNK + 1
        return *self._settings, self._kept(CHUNK), self._kept(last)

    @property
    def _least_nbytes(self) -> int:
        return HEADER

    def pieces(self, device: torch.device) -> None:
        """Return None: kernels take one tensor at a time (``kernels/cuda/topk.cu`` says why)."""
