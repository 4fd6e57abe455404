"""Hold residuals back from a reduction whose result is discarded, and restore them afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from hybridcomp.channels.residuals.pieces import Piece, ResidualStretch
from hybridcomp.codecs.quantized_residual import QuantizedResidual, Residual, as_fp32


class DeferredResiduals:
    """Residuals of parameters whose sum is discarded, held back from a message.

    Only the device knows these parameters; the host does not wait for it.
    """

    def __init__(self, taken: Mapping[str, Tensor]) -> None:
        """Store ``taken``: by parameter name, a bool () on the device: whether its sum is used."""
        self._taken = taken
        self._kept: list[tuple[Residual, Tensor]] = []

    def take(self, flat: Residual | None, pieces: Sequence[Piece]) -> None:
        """Move residuals of discarded parameters out of ``flat``, which holds ``pieces``."""
        if flat is None:
            return
        for piece, part in ResidualStretch(tuple(pieces), flat).parts():
            taken = self._taken.get(piece.name)
            if taken is not None:
                values = as_fp32(part)
                self._kept.append((part, values.masked_fill(taken, 0.0)))
                values.masked_fill_(~taken, 0.0)
                if isinstance(part, QuantizedResidual):
                    part.pack(values)

    def give_back(self) -> None:
        """Add the kept residuals back once the message has arrived."""
        for part, values in self._kept:
            part.add_(values)
        self._kept.clear()
