"""Interfaces of kernels that process several tensors in one launch, where a back end has them.

With a ``residual`` (as long as ``values``), ``encode`` sends ``values + residual``, and the
residual becomes the error of the encoding, 0 where that is not finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from hybridcomp.kernels.kept import Kept
from hybridcomp.kernels.stretches import PlannedStretch, StretchTable, read_lengths

__all__ = [
    "NO_CHUNK", "CollectiveKernel", "MultiTensorKernel", "PlannedKernel", "PlannedStretch",
    "StretchTable", "read_lengths",
]  # fmt: skip

#: value of ``skip`` if no chunk is left out
NO_CHUNK = -1


class CollectiveKernel(Protocol):
    """Kernels that take all chunks of a reduction at once; payloads are those of the codec.

    Chunk c holds elements ``[c * chunk, (c + 1) * chunk)``; their payloads, leaving out chunk
    ``skip`` if there is one, lie ``slot`` bytes apart, the payload size of a whole chunk. Residuals
    are fp32 or of fewer bits. In the latter case both have equally many bits, and in ``encode`` the
    residual of chunk c begins at value ``c * n``, n being ``chunk`` rounded up to a multiple of 32.
    """

    def encode(
        self,
        values: Tensor,
        chunk: int,
        slot: int,
        skip: int,
        out: Tensor,
        residual: Kept | None = None,
    ) -> None:
        """Encode every chunk but ``skip``, whose residual stays, into ``out``."""

    def reduce(
        self,
        payloads: Tensor,
        own: Tensor,
        ranks: int,
        me: int,
        out: Tensor,
        residual: Kept | None = None,
        owner_residual: Kept | None = None,
    ) -> None:
        """Encode the fp32 sum, in rank order, of ``own`` (exact) and the others' ``payloads``.

        A 16-bit result that would overflow becomes Inf in the sum, as natively. ``residual`` (as
        long as ``own``) is added to ``own`` and becomes 0. The sum starts from
        ``owner_residual``, which becomes its error after decoding to the dtype of ``own``.
        """

    def sum(
        self,
        payloads: Tensor,
        own: Tensor,
        ranks: int,
        me: int,
        out: Tensor,
        residual: Kept | None = None,
        begin: Tensor | None = None,
    ) -> None:
        """Sum in fp32 and rank order into ``out``; ``own`` and ``residual`` as in ``reduce``.

        ``begin`` (fp32, as long as ``out``, or ``out`` itself): initial value of the sum.
        """

    def decode(
        self, payloads: Tensor, chunk: int, slot: int, out: Tensor, skip: int = NO_CHUNK
    ) -> None:
        """Decode all chunks but ``skip`` into ``out``."""


class MultiTensorKernel(Protocol):
    """Kernels that take several tensors of one dtype in one launch; payloads are the codec's.

    Arguments must satisfy the codec's ``encode`` and ``decode``; they are not checked again.
    """

    def encode(
        self,
        values: Sequence[Tensor],
        out: Sequence[Tensor],
        residuals: Sequence[Kept] | None = None,
    ) -> None:
        """Encode each of ``values`` into its ``out``."""

    def decode(
        self, payloads: Sequence[Tensor], out: Sequence[Tensor], *, add: bool = False
    ) -> None:
        """Decode each of ``payloads`` into its ``out``; ``add``: add to ``out``, in fp32."""


class PlannedKernel(Protocol):
    """Kernels that process any number of slices of one tensor in one launch.

    Payloads are the codec's. A table is made once; a launch takes tensors at any address. They must
    satisfy the codec's ``encode`` and ``decode`` and are not checked again.
    """

    def table(self, stretches: Sequence[PlannedStretch], *, sums: bool = False) -> StretchTable:
        """Return the table of ``stretches``. ``sums``: for ``sum``."""

    def encode(
        self,
        table: StretchTable,
        values: Tensor | None,
        payloads: Tensor,
        residual: Kept | None = None,
    ) -> None:
        """Encode every stretch of ``values`` into its place in ``payloads``.

        A residual of fewer than 32 bits needs slices that begin at multiples of 32. With ``values``
        None, the fp32 residual already holds the sum.
        """

    def decode(
        self, table: StretchTable, payloads: Tensor, out: Tensor, ranks: int = 1, slot: int = 0
    ) -> None:
        """Decode the payload of every stretch into its place in ``out``.

        With several ``ranks``, ``payloads`` holds all payloads of each rank, ``slot`` bytes apart,
        and ``out`` an equal share for each rank, with the same slices in it.
        """

    def sum(
        self,
        table: StretchTable,
        payloads: Tensor,
        own: Tensor,
        ranks: int,
        me: int,
        out: Tensor,
        residual: Kept | None = None,
        begin: Tensor | None = None,
    ) -> None:
        """Sum every stretch in fp32 and in rank order into its place in ``out``.

        Args:
            table: made with ``sums``.
            payloads: the payloads of all slices, rank after rank, without rank ``me``.
            own: the values that rank ``me`` adds exactly, with ``residual``, which becomes 0; may
                be ``out``, each stretch in its place.
            begin: fp32, as long as ``out``, or ``out`` itself: the sums start from it.
        """
