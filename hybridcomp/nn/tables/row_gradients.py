"""Accumulate the gradients of rows on their owner until the optimizer step."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridcomp.nn.tables.owners import Asked, Owners


class RowGradients:
    """Gradients of this rank's rows, fp32, of every backward pass since the last step."""

    def __init__(self, owners: Owners, width: int, average: bool, padding: int | None) -> None:
        """``average``: divide by the number of ranks; ``padding``: a row that gets no gradient."""
        self._owners, self._width, self._average = owners, width, average
        self._padding = padding
        self._waiting: list[tuple[Tensor, Tensor]] = []

    def give(self, asked: Asked, gradients: Tensor) -> None:
        """Send the gradients (n, width) of ``asked.unique`` to their owners, who add them up."""
        if asked.order is not None:
            gradients = gradients.index_select(0, asked.order.to(gradients.device))
        got = self._owners.exchange(gradients, asked.gives, asked.takes, "backward")
        rows = asked.wanted
        total = torch.zeros((len(rows), self._width), device=got.device, dtype=torch.float32)
        places = asked.answer.to(got.device)
        begin = 0
        for taken in asked.takes:  # in rank order; a rank asks for a row once
            some = slice(begin, begin + taken)
            total.index_add_(0, places[some], got[some].to(torch.float32))
            begin += taken
        if self._average:
            total /= self._owners.ranks
        if self._padding is not None:  # as torch, which does not update the padding row
            is_row = rows != self._padding
            rows, total = rows[is_row], total[is_row.to(total.device)]
        self._waiting.append((rows, total))

    @property
    def is_empty(self) -> bool:
        """Return whether no backward pass has sent gradients, not even of an empty batch."""
        return not self._waiting

    def take(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the rows with gradients, ascending, and their gradients (n, width).

        The gradients of several lookups are added in the order of their backward passes.
        """
        if len(self._waiting) > 1:
            every, places = torch.unique(
                torch.cat([rows for rows, _ in self._waiting]), return_inverse=True
            )
            total = torch.zeros((len(every), self._width), device=device, dtype=torch.float32)
            parts = torch.split(places, [len(rows) for rows, _ in self._waiting])
            for at, (_, gradients) in zip(parts, self._waiting, strict=True):
                total.index_add_(0, at.to(device), gradients)
            self._waiting[:] = [(every, total)]
        if not self._waiting:
            return torch.empty(0, dtype=torch.int64, device="cpu"), torch.zeros(
                (0, self._width), device=device, dtype=torch.float32
            )
        return self._waiting[0]

    def drop(self) -> None:
        self._waiting.clear()
