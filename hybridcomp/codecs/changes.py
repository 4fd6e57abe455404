"""Compare two versions of 16-bit weights on a host: checksums, and which values differ."""

from __future__ import annotations

from typing import Protocol

import torch

from hybridcomp.kernels import KernelSet


class ChangeKernels(Protocol):
    """Loops over weights on a host; addresses as in ``FixedKernels``, 16-bit values."""

    def digest(self, data: int, nbytes: int, threads: int, /) -> bytes:
        """Return the checksum of bytes."""

    def compare(
        self, values: int, old: int, numel: int, mask: int, threads: int, /
    ) -> tuple[int, bytes]:
        """Return how many values differ, and the checksum of ``values``.

        Marks the differing positions in ``mask``; address 0 stands for no mask.
        """

    def pick(self, values: int, mask: int, numel: int, out: int, /) -> int:
        """Copy the values selected by ``mask`` to ``out`` without gaps; return their number."""

    def put(self, picked: int, mask: int, numel: int, out: int, /) -> None:
        """Copy values that ``pick`` collected back to their positions in ``out``."""

    def places(self, mask: int, numel: int, out: int, /) -> None:
        """Write the positions set in ``mask`` as int64."""


_KERNELS = KernelSet[ChangeKernels]("changes")


def change_kernels() -> ChangeKernels:
    """Return the loops of the host."""
    return _KERNELS.on(torch.device("cpu"))
