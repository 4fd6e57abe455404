"""Interfaces of optional kernels that process several tensors in one launch.

With a ``residual`` (as long as ``values``), ``encode`` encodes ``values + residual`` and then
writes the encoding error to the residual, or 0 where the error is not finite.
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

    Chunk c holds elements ``[c * chunk, (c + 1) * chunk)``. Payloads of the chunks, without chunk
    ``skip`` if there is one, lie ``slot`` bytes apart, the payload size of a whole chunk. Residuals
    are fp32 or low-bit. If low-bit, ``residual`` and ``owner_residual`` have equally many bits, and
    in ``encode`` the residual of chunk c begins at value ``c * n``, where n is ``chunk`` rounded up
    to a multiple of 32.
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
        """Encode every chunk but ``skip`` into ``out``; the residual of ``skip`` stays as it is."""

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
        """Add ``own`` (exact) and the other ranks' ``payloads`` in fp32 and rank order; encode.

        A sum that would overflow a 16-bit result becomes Inf, as natively. ``residual`` (as long as
        ``own``) is added to ``own`` and becomes 0. The sum starts from ``owner_residual``, which
        becomes the error of the encoded sum after decoding to the dtype of ``own``.
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

        ``begin``: start values of the sum, fp32: a tensor as long as ``out``, or ``out`` itself.
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
        """Encode ``values[i]`` into ``out[i]`` for every i."""

    def decode(
        self, payloads: Sequence[Tensor], out: Sequence[Tensor], *, add: bool = False
    ) -> None:
        """Decode ``payloads[i]`` into ``out[i]``, or with ``add`` add it there in fp32."""


class PlannedKernel(Protocol):
    """Kernels that process any number of slices of one tensor in one launch.

    Payloads are the codec's. A table of slices is made once; a launch applies it to tensors at any
    address. Tensors must satisfy the codec's ``encode`` and ``decode``; they are not checked again.
    """

    def table(self, stretches: Sequence[PlannedStretch], *, sums: bool = False) -> StretchTable:
        """Return the table of ``stretches``; ``sums``: the table is for ``sum``."""

    def encode(
        self,
        table: StretchTable,
        values: Tensor | None,
        payloads: Tensor,
        residual: Kept | None = None,
    ) -> None:
        """Encode every stretch of ``values`` into its place in ``payloads``.

        With a residual of fewer than 32 bits, slices must begin at multiples of 32. ``values``
        None: ``residual`` (fp32) already holds ``values + residual``.
        """

    def decode(
        self, table: StretchTable, payloads: Tensor, out: Tensor, ranks: int = 1, slot: int = 0
    ) -> None:
        """Decode the payload of every stretch into its place in ``out``.

        With several ``ranks``, the payloads of each rank begin ``slot`` bytes after those of the
        previous rank, and ``out`` consists of one equally long part per rank, to each of which the
        table applies.
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
            own: values of rank ``me``, added exactly; may be ``out``, with every stretch at its
                place there.
            residual: added to ``own``; becomes 0.
            begin: start values of the sums, fp32: a tensor as long as ``out``, or ``out`` itself.
        """
