"""Residuals of error feedback as arguments of GPU kernels: fp32, or quantized to fewer bits."""

from __future__ import annotations

from typing import Protocol, TypeAlias

from torch import Tensor


class FewBits(Protocol):
    """A quantized residual, as kernels take it; it begins and ends at borders of blocks."""

    @property
    def bits(self) -> int:
        """Return the bits per value."""

    def addresses(self) -> tuple[int, int]:
        """Return the addresses of the levels and of the steps."""


#: a residual: fp32, or quantized to fewer bits
Kept: TypeAlias = Tensor | FewBits


def bits_of(residual: Kept | None) -> int:
    """Return the bits per value of ``residual``; 32 for None."""
    return 32 if residual is None or isinstance(residual, Tensor) else residual.bits


def words_of(residual: Kept | None, bits: int) -> tuple[int, ...]:
    """Return a kernel's arguments for ``residual``; the kernel was compiled for ``bits`` bits."""
    if residual is None:
        return (0,) if bits == 32 else (0, 0)
    assert bits_of(residual) == bits, "kernels take residuals of one kind"
    return (residual.data_ptr(),) if isinstance(residual, Tensor) else residual.addresses()
