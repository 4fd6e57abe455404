"""Residuals of error feedback as kernels of GPUs take them: fp32, or of fewer bits."""

from __future__ import annotations

from typing import Protocol, TypeAlias

from torch import Tensor


class FewBits(Protocol):
    """What kernels ask of a residual of fewer bits that begins and ends between blocks."""

    @property
    def bits(self) -> int:
        """Bits of a value."""

    def addresses(self) -> tuple[int, int]:
        """Return the addresses of the levels and of the steps."""


#: a residual, fp32 or of fewer bits
Kept: TypeAlias = Tensor | FewBits


def bits_of(*residuals: Kept | None) -> int:
    """Return the bits of a value of ``residuals``, which have the same; None has any."""
    found = {32 if isinstance(r, Tensor) else r.bits for r in residuals if r is not None}
    assert len(found) <= 1, "kernels take residuals of one kind"
    return found.pop() if found else 32


def words_of(residual: Kept | None, bits: int) -> tuple[int, ...]:
    """Return the arguments of a kernel for ``residual``, in an image for residuals of ``bits``."""
    if residual is None:
        return (0,) if bits == 32 else (0, 0)
    return (residual.data_ptr(),) if isinstance(residual, Tensor) else residual.addresses()
