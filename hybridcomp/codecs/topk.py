"""topk: the largest values of every 4096, in few bits, with their places entropy-coded.

For deltas whose rest error feedback sends later (Sarfi et al. 2025, SparseLoCo). The payload stands
at the top of ``kernels/formats/topk.h``.

Gaps are geometric where the largest values lie anywhere, for which Rice's code is
within a few percent of the entropy: at a density of 1/64 and 2 bits a message has 0.153 bits a
value.
"""

from __future__ import annotations

import math
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec, align
from hybridcomp.codecs.checks import check_add, check_decode, check_dtype, check_encode, check_size
from hybridcomp.codecs.setting import Setting
from hybridcomp.errors import CodecError
from hybridcomp.kernels import DTYPE_CODES, KernelSet, stores_sizes

CHUNK = 4096
HEADER = 16


class TopKKernels(Protocol):
    """Kernels of topk on every back end.

    The first settings: bits of a value kept, low bits of a gap, values kept of a whole chunk and of
    the last one.
    """

    def encode(
        self,
        bits: int,
        rice: int,
        most: int,
        last: int,
        dtype: int,
        values: int,
        numel: int,
        out: int,
        nbytes: int,
        threads: int,
        size: int = 0,
        /,
    ) -> int:
        """Write a payload of at most ``nbytes``, which is the worst case."""

    def decode(
        self,
        bits: int,
        rice: int,
        most: int,
        last: int,
        dtype: int,
        payload: int,
        nbytes: int,
        out: int,
        numel: int,
        add: bool,
        threads: int,
        /,
    ) -> None:
        """Read values into ``out``, or ``add`` them to fp32."""


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
    kernels = KernelSet[TopKKernels](name)
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
        return self._encode(values, out)

    def encode_into(self, values: Tensor, out: Tensor, size: Tensor) -> None:
        if stores_sizes(values.device) and values.numel():
            check_size(self.spec, size, values.device)
            self._encode(values, out, size.data_ptr())
        else:
            size.fill_(self._encode(values, out))

    def decode(self, payload: Tensor, out: Tensor) -> None:
        self._decode(payload, out, add=False)

    def decode_add(self, payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
        check_add(self.spec, out, dtype)
        self._decode(payload, out, add=True)

    def element_bound(self, absmax: float, dtype: torch.dtype) -> float:
        check_dtype(self.spec, dtype)
        return absmax * 1.01

    def _settings(self, numel: int) -> tuple[int, int, int, int]:
        """Return the first arguments of the kernels."""
        last = (numel - 1) % CHUNK + 1
        return self.bits, self._rice, self._kept(CHUNK), self._kept(last)

    def _encode(self, values: Tensor, out: Tensor, *size: int) -> int:
        nbytes = self.wire_nbytes(values.numel(), values.dtype)
        check_encode(self.spec, values, out, nbytes)
        if not values.numel():
            return 0
        return self.kernels.on(values.device).encode(
            *self._settings(values.numel()), DTYPE_CODES[values.dtype], values.data_ptr(),
            values.numel(), out.data_ptr(), nbytes, torch.get_num_threads(), *size,
        )  # fmt: skip

    def _decode(self, payload: Tensor, out: Tensor, *, add: bool) -> None:
        check_decode(self.spec, payload, out, HEADER if out.numel() else 0)
        if not out.numel():
            return
        try:
            self.kernels.on(out.device).decode(
                *self._settings(out.numel()), DTYPE_CODES[out.dtype], payload.data_ptr(),
                payload.numel(), out.data_ptr(), out.numel(), add, torch.get_num_threads(),
            )  # fmt: skip
        except ValueError as error:
            raise CodecError(f"{self.spec}: cannot decode {out.numel()} values: {error}") from error
