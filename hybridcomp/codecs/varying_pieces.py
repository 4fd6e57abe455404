"""Encode and decode all variable-size payloads of a message at once, on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor

from hybridcomp.codecs.checks import DTYPE_NAMES
from hybridcomp.kernels import DTYPE_CODES, stores_sizes
from hybridcomp.kernels.cuda.workspaces import SLAB
from hybridcomp.kernels.pieces import PayloadPiece, PieceFunctions

#: bytes of the slab of words that kernels of variable-size codecs keep for each stream
WORDS_NBYTES = 8 * SLAB
#: bits of -0.0, to which any fp32 value can be added unchanged
MINUS_ZERO = 1 << 31


class PieceKernel:
    """Kernels of a codec of variable size for any number of tensors of one dtype, on one device.

    The number of launches does not depend on the number of tensors. Payloads are the codec's.
    Arguments must satisfy the codec's ``encode_into``, ``decode`` and ``decode_add``; they are not
    checked again.

    Args:
        functions: the codec's kernels.
        settings: first arguments of the kernels.
        lossless: whether the codec is lossless, so that decoders need the encoded dtype.
        held: for a codec that encodes ``against`` earlier values: those of the whole message.
    """

    def __init__(
        self, functions: PieceFunctions, settings: tuple[float, ...], lossless: bool,
        held: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._functions, self._settings = functions, settings
        self._lossless, self._held = lossless, held

    def encode(
        self, values: Sequence[Tensor], out: Sequence[Tensor], sizes: Tensor,
        places: Sequence[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        """Encode ``values[i]`` into ``out[i]`` and store the bytes used in ``sizes[i]`` (int64).

        ``places``: start and end of each tensor in the message, for a codec that encodes
        ``against`` earlier values.
        """
        if not values:
            return
        if not all(value.numel() for value in values):
            sizes.zero_()
        held, start = self._held, sizes.data_ptr()
        references = [0] * len(values)
        if held is not None:
            begin, width = held.data_ptr(), held.itemsize
            references = [begin + width * place for place, _ in places] or [begin] * len(values)
        rows = zip(values, out, range(start, start + 8 * len(values), 8), references, strict=True)
        pieces = [
            PayloadPiece(one.data_ptr(), one.numel(), payload.data_ptr(), size, reference)
            for one, payload, size, reference in rows
        ]
        self._functions.encode_pieces(*self._settings, DTYPE_CODES[values[0].dtype], pieces=pieces)

    def decode(self, payloads: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """Decode ``payloads[i]`` into ``out[i]`` for every i."""
        if out:
            self._decode(payloads, out, 1, out[0].dtype, add=False)

    def decode_fp32(
        self, payloads: Sequence[Tensor], out: Sequence[Tensor], dtype: torch.dtype
    ) -> None:
        """Decode values of ``dtype`` into fp32 ``out``; lossless codecs may decode -0.0 as 0."""
        if self._lossless and dtype != torch.float32:
            self.begin(out, [False] * len(out), dtype)
            self.add([[payload] for payload in payloads], out, dtype)
        else:
            self.decode(payloads, out)

    def begin(self, out: Sequence[Tensor], exact: Sequence[bool], dtype: torch.dtype) -> None:
        """Fill each fp32 ``out`` with 0 or -0.0, to which adding a first value copies that value.

        ``exact``: for each ``out``, whether its first values come from a tensor, not a payload.
        """
        narrow = self._lossless and dtype != torch.float32
        zeros = [0 if narrow and not one else MINUS_ZERO for one in exact]
        rows = zip(out, zeros, strict=True)
        pieces = [PayloadPiece(one.data_ptr(), one.numel(), 0, zero) for one, zero in rows]
        self._functions.on_values("fill", pieces)

    def accumulate(self, totals: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Add ``values[i]``, all of one dtype, to ``totals[i]`` (fp32) for every i."""
        if values:
            self._functions.on_values(f"add_{DTYPE_NAMES[values[0].dtype]}", _pairs(totals, values))

    def settle(self, residuals: Sequence[Tensor], delivered: Sequence[Tensor]) -> None:
        """Subtract ``delivered`` from ``residuals``, all fp32; set non-finite results to 0."""
        self._functions.on_values("settle", _pairs(residuals, delivered))

    def add(
        self, payloads: Sequence[Sequence[Tensor]], out: Sequence[Tensor], dtype: torch.dtype
    ) -> None:
        """Decode equally long rows of ``payloads`` and add them, in order, to ``out`` (fp32).

        ``dtype``: the encoded dtype.
        """
        if out and payloads[0]:
            flat = [payload for row in payloads for payload in row]
            told = dtype if self._lossless else torch.float32
            self._decode(flat, out, len(payloads[0]), told, add=True)

    def _decode(
        self, payloads: Sequence[Tensor], out: Sequence[Tensor], ranks: int, dtype: torch.dtype, *,
        add: bool,
    ) -> None:  # fmt: skip
        pieces, rows = list[PayloadPiece](), iter(payloads)
        for one in out:
            place = one.data_ptr()
            for payload in islice(rows, ranks):
                nbytes = payload.numel()
                pieces.append(PayloadPiece(place, one.numel(), payload.data_ptr(), nbytes, place))
        self._functions.decode_pieces(
            *self._settings, DTYPE_CODES[dtype], pieces=pieces, ranks=ranks, add=add
        )


def _pairs(out: Sequence[Tensor], values: Sequence[Tensor]) -> list[PayloadPiece]:
    rows = zip(out, values, strict=True)
    return [PayloadPiece(one.data_ptr(), one.numel(), v.data_ptr(), 0) for one, v in rows]


def varying_pieces(
    functions: Any, device: torch.device, settings: tuple[float, ...], lossless: bool,
    held: Tensor | None = None,
) -> PieceKernel | None:  # fmt: skip
    """Return a ``PieceKernel`` of ``functions``, the kernels of ``device``.

    Returns None if kernels of ``device`` do not leave payload sizes on it, as on a CPU.
    """
    if not stores_sizes(device):
        return None
    return PieceKernel(cast(PieceFunctions, functions), settings, lossless, held)
