"""Pieces of a message, each with its payload, for kernels that take all pieces in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class PayloadPiece(NamedTuple):
    """Tensor with its own payload, given by addresses.

    Attributes:
        values, numel: address and number of the values that are encoded, or written by a decoder.
        payload: address of the payload.
        size: for an encoder, address of an int64 that receives the bytes used; for a decoder, the
            bytes of the payload.
        reference: address of the reference values, from which stepcode counts steps.
    """

    values: int
    numel: int
    payload: int
    size: int
    reference: int = 0


class PieceFunctions(Protocol):
    """Kernels of a codec of variable size for any number of pieces; settings are the first args.

    The number of launches does not depend on the number of pieces. Empty pieces are skipped.
    """

    def on_values(self, kernel: str, pieces: Sequence[PayloadPiece]) -> None:
        """Run a kernel on the fp32 values of each piece.

        ``add_<dtype>``: add the values at ``payload``. ``settle``: subtract the fp32 values at
        ``payload``; non-finite results become 0. ``fill``: write the float with the bits ``size``.
        """

    def encode_pieces(self, *settings_and_dtype: Any, pieces: Sequence[PayloadPiece]) -> None:
        """Encode each piece, and store the bytes used."""

    def decode_pieces(
        self,
        *settings_and_dtype: Any,
        pieces: Sequence[PayloadPiece],
        ranks: int = 1,
        add: bool = False,
    ) -> None:
        """Decode each piece, or ``add`` to fp32 values.

        With several ``ranks``, that many consecutive pieces are added to the same values, in this
        order.
        """
