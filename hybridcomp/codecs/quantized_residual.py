"""Residuals of error feedback in 4, 8 or 16 bits a value in place of fp32.

4 and 8 bits: integers with one step size per block of 32 values (``kernels/formats/residual.h``),
0.56 and 1.06 bytes a value. A stored value differs from the true residual by at most half a step.
The step is the block's absmax / 127 at 8 bits and absmax / 7 at 4 bits, rounded up by at most
0.4 %. 16 bits: bf16, with an error of at most 1/256 of the value. Unpacking and repacking a block
does not change its bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from hybridcomp.kernels import KernelSet

#: bits per value that a residual may have
BITS = (4, 8, 16, 32)
#: number of values that share a step
BLOCK = 32
#: largest level and the 16 bits of the largest step, by bits per value
_TOP = {4: (7, 0xFC24), 8: (127, 0xF802)}
#: the upper bits of the smallest step, 2^-126; number of low bits of a step that are dropped
_SMALLEST, _DROPPED = 0x0100, 15
#: number of values that ``squared`` unpacks at once
_STRETCH = 1 << 20
#: keys of a saved residual
_KEYS = {"bits", "start", "numel", "data"}


class ResidualKernels(Protocol):
    """Kernels of quantized residuals; addresses as of ``FixedKernels``, blocks are whole."""

    def load(self, bits: int, levels: int, steps: int, numel: int, out: int, threads: int) -> None:
        """Write ``numel`` values as fp32 to ``out``."""

    def store(
        self, bits: int, values: int, numel: int, levels: int, steps: int, threads: int
    ) -> None:
        """Quantize ``numel`` fp32 values, NaN and Inf as 0."""


KERNELS = KernelSet[ResidualKernels]("residual")


class QuantizedResidual:
    """A flat residual of ``numel`` values with ``bits`` 4, 8 or 16 each, or a view of a part of it.

    Blocks of 32 values begin at multiples of 32 of the whole residual. Writing a view that does not
    begin and end at block borders also requantizes the other values in its first and last block.

    Attributes:
        start, stop: range of the whole residual that the view covers.
    """

    def __init__(
        self, bits: int, numel: int, device: torch.device, data: Tensor | None = None
    ) -> None:
        """Create zeros, or use ``data``: uint8, ``nbytes_of(bits, numel)`` long."""
        size = nbytes_of(bits, numel)
        self.bits, self.device, self._total = bits, device, numel
        self._data = torch.zeros(size, dtype=torch.uint8, device=device) if data is None else data
        assert self._data.numel() == size, "not the bytes of so many values"
        self.start, self.stop = 0, numel

    def numel(self) -> int:
        """Return the number of values of this view."""
        return self.stop - self.start

    __len__ = numel

    def __getitem__(self, part: slice) -> QuantizedResidual:
        """Return a view of values ``part``, a slice without step."""
        low, high, step = part.indices(self.numel())
        assert step == 1, "a view has neighbouring values"
        return self.view(self.start + low, self.start + max(low, high))

    def view(self, start: int, stop: int) -> QuantizedResidual:
        """Return a view of values ``start`` to ``stop`` of the whole residual."""
        found = QuantizedResidual(self.bits, self._total, self.device, self._data)
        found.start, found.stop = start, stop
        return found

    def shares(self, other: QuantizedResidual) -> bool:
        """Return whether ``other`` is a view of the same residual."""
        return self._data is other._data

    @property
    def nbytes(self) -> int:
        """Return the memory of the whole residual, in bytes."""
        return self._data.nbytes

    @property
    def in_blocks(self) -> bool:
        """Return whether the view begins and ends at block borders, so kernels may write it."""
        ends = self.stop % BLOCK == 0 or self.stop == self._total
        return self.start % BLOCK == 0 and ends

    def addresses(self) -> tuple[int, int]:
        """Return the addresses of the levels and of the steps of a view that is ``in_blocks``."""
        base = self._data.data_ptr()
        steps = base + _levels_nbytes(self.bits, self._total) + self.start // BLOCK * 2
        return base + self.start * self.bits // 8, steps

    def _widened(self) -> QuantizedResidual:
        """Return the smallest view of whole blocks that contains this view."""
        low = self.start // BLOCK * BLOCK
        return self.view(low, min(-(-self.stop // BLOCK) * BLOCK, self._total))

    def _within(self, wide: QuantizedResidual) -> slice:
        return slice(self.start - wide.start, self.stop - wide.start)

    def unpack(self, out: Tensor | None = None) -> Tensor:
        """Return the values as fp32: in a new tensor, or in ``out``."""
        wide = self._widened()
        if out is None or not self.in_blocks:
            values = torch.empty(wide.numel(), dtype=torch.float32, device=self.device)
        else:
            values = out
        threads, places = torch.get_num_threads(), wide.addresses()
        kernels = KERNELS.on(self.device)
        kernels.load(self.bits, *places, wide.numel(), values.data_ptr(), threads)
        if out is None or out is values:
            return values[self._within(wide)] if values.numel() != self.numel() else values
        return out.copy_(values[self._within(wide)])

    def pack(self, values: Tensor) -> None:
        """Quantize ``values`` (fp32, as many as the view has) into this view.

        NaN and Inf become 0.
        """
        wide = self._widened()
        if not self.in_blocks:
            around = wide.unpack()
            around[self._within(wide)] = values
            values = around
        threads, places = torch.get_num_threads(), wide.addresses()
        kernels = KERNELS.on(self.device)
        kernels.store(self.bits, values.data_ptr(), wide.numel(), *places, threads)

    def _parts(self) -> tuple[Tensor, Tensor]:
        """Return levels (uint8) and steps (int16) of the blocks of a view that is ``in_blocks``."""
        blocks, edge = -(-self.numel() // BLOCK), _levels_nbytes(self.bits, self._total)
        first, each = self.start // BLOCK, BLOCK * self.bits // 8
        steps = self._data[edge:].view(torch.int16)[first : first + blocks]
        return self._data[: first * each + blocks * each][first * each :], steps

    def add_(self, values: Tensor) -> None:
        """Add ``values`` (fp32) to the values, in place."""
        self.pack(self.unpack().add_(values.to(self.device)))

    def zero_(self, *, steps: bool = False) -> None:
        """Set the values to zero; with ``steps`` also the block steps, as packing zeros does."""
        if self.in_blocks:  # without ``steps`` block steps stay, as when kernels write zeros
            levels, each = self._parts()
            levels.zero_()
            if steps:
                each.fill_(_SMALLEST)
        else:
            self.pack(torch.zeros(self.numel(), device=self.device, dtype=torch.float32))

    def mul_(self, factor: float) -> None:
        """Multiply the whole residual, not only the view, by a positive ``factor``.

        At 4 and 8 bits, block steps are multiplied and rounded to 9 significant bits: this changes
        a value by at most a quarter of a step, and by nothing if ``factor`` is a power of two.
        """
        levels, steps = self.view(0, self._total)._parts()
        if self.bits == 16:
            most = torch.finfo(torch.bfloat16).max
            levels.view(torch.bfloat16).mul_(factor).clamp_(-most, most)
            return
        floats = ((steps.int() & 0xFFFF) << _DROPPED).view(torch.float32)
        scaled = (floats.double() * factor).float().view(torch.int32)
        codes = (scaled + (1 << (_DROPPED - 1))) >> _DROPPED
        steps.copy_(codes.clamp(max=_TOP[self.bits][1]).to(torch.int16))

    def squares(self) -> Tensor:
        """Return the squared L2 norm of the values, float64 () on their device."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for low in range(0, self.numel(), _STRETCH):
            total += squares(self[low : low + _STRETCH].unpack())
        return total

    def clone(self) -> QuantizedResidual:
        """Return a copy of only the blocks of this view, with the same bits."""
        wide = self._widened()
        levels, steps = wide._parts()
        nbytes, numel = steps.nbytes if self.bits != 16 else 0, self.stop - wide.start
        data = torch.cat([levels, steps.view(torch.uint8)[:nbytes]])
        found = QuantizedResidual(self.bits, numel, self.device, data)
        return found[self.start - wide.start :]

    def state(self) -> dict[str, Any]:
        """Return the blocks of this view for a checkpoint, on the CPU; ``from_state`` reads it."""
        copy = self.clone()
        own = {"bits": self.bits, "start": copy.start, "numel": copy.numel()}
        return {**own, "data": copy._data.cpu()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> QuantizedResidual:
        """Restore the result of ``state``, on the CPU; ``is_state`` must hold for it."""
        start, numel, data = state["start"], state["numel"], state["data"].clone()
        return cls(state["bits"], start + numel, data.device, data)[start:]

    @classmethod
    def of(cls, values: Tensor, bits: int) -> QuantizedResidual:
        """Quantize ``values``, fp32."""
        found = cls(bits, values.numel(), values.device)
        found.pack(values)
        return found


#: a stored residual: fp32, or low-bit
Residual: TypeAlias = Tensor | QuantizedResidual


def nbytes_of(bits: int, numel: int) -> int:
    """Return the memory of a residual of ``numel`` values in bytes; ``bits``: any of ``BITS``."""
    if bits == 32:
        return 4 * numel
    return _levels_nbytes(bits, numel) + (0 if bits == 16 else -(-numel // BLOCK) * 2)


def zeros(bits: int, numel: int, device: torch.device) -> Residual:
    """Make a residual of zeros; ``bits``: any of ``BITS``."""
    if bits == 32:
        return torch.zeros(numel, dtype=torch.float32, device=device)
    return QuantizedResidual(bits, numel, device)


def as_fp32(residual: Residual) -> Tensor:
    """Return the values of ``residual`` as fp32: an fp32 residual itself, else a new tensor."""
    return residual if isinstance(residual, Tensor) else residual.unpack()


def split(residual: Residual, numels: Sequence[int]) -> list[Residual]:
    """Split ``residual`` into consecutive views of ``numels`` values each."""
    found: list[Residual] = []
    start = 0
    for numel in numels:
        found.append(residual[start : start + numel])
        start += numel
    return found


def clear(residual: Residual) -> None:
    """Set ``residual`` to zero, including steps, as packing zeros does."""
    if isinstance(residual, QuantizedResidual):
        residual.zero_(steps=True)
    else:
        residual.zero_()


def squares(residual: Residual) -> Tensor:
    """Return the squared L2 norm of ``residual``, float64 () on its device."""
    if isinstance(residual, QuantizedResidual):
        return residual.squares()
    return residual.double().square().sum()


def is_state(value: Any) -> bool:
    """Return whether ``value`` is a result of ``QuantizedResidual.state`` with finite values."""
    if not isinstance(value, dict) or set(value) != _KEYS or value["bits"] not in BITS[:-1]:
        return False
    bits, start, numel, data = (value[key] for key in ("bits", "start", "numel", "data"))
    counts = (bits, start, numel)
    if not all(isinstance(count, int) and count >= 0 for count in counts) or start >= BLOCK:
        return False
    if not isinstance(data, Tensor) or data.dtype != torch.uint8 or data.dim() != 1:
        return False
    if data.numel() != nbytes_of(bits, start + numel):
        return False
    if bits == 16:
        return bool(data.view(torch.bfloat16).isfinite().all())
    codes = data[_levels_nbytes(bits, start + numel) :].view(torch.int16).int() & 0xFFFF
    return bool((codes <= _TOP[bits][1]).all())


def _levels_nbytes(bits: int, numel: int) -> int:
    return -(-numel // BLOCK) * BLOCK * bits // 8
