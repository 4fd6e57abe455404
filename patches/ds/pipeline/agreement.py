"""Agree between neighbouring pipeline stages on tensors and dtypes; see ``pipeline``."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

#: added to the dtype id of a tensor that a codec may change; upstream has 12 ids
VALUES = 1 << 16


@dataclass(frozen=True)
class Agreed:
    """One tensor of a set: the dtype sent, and whether a codec may change its values."""

    dtype: torch.dtype
    values: bool


@dataclass(frozen=True)
class Agreement:
    """One set of tensors between two stages, and the gradients that come back for it."""

    activations: tuple[Agreed, ...]
    gradients: tuple[Agreed, ...]


@dataclass
class Neighbour:
    """Agreement with one neighbour, and the position of the next tensor in it."""

    agreed: Agreement | None = None
    #: sets whose gradients have not arrived yet, in the order of their micro-batches
    waiting: deque[Agreement] = field(default_factory=deque)
    activation_index: int = 0
    gradient_index: int = 0

    def restart(self) -> None:
        """Reset for a new schedule; drop an evaluation's sets, which get no gradients."""
        self.waiting.clear()
        self.activation_index = self.gradient_index = 0

    def activation(self) -> Agreed | None:
        """Return the next activation and advance to it; None without an agreement."""
        if self.agreed is None:
            return None
        if self.activation_index == 0:
            self.waiting.append(self.agreed)
        found = self.agreed.activations[self.activation_index]
        self.activation_index = (self.activation_index + 1) % len(self.agreed.activations)
        return found

    def gradient(self) -> Agreed | None:
        """Return the next gradient and advance to it; None without an agreement."""
        if self.agreed is None:
            return None
        gradients = self.waiting[0].gradients
        found = gradients[self.gradient_index]
        self.gradient_index = (self.gradient_index + 1) % len(gradients)
        if self.gradient_index == 0:
            self.waiting.popleft()
        return found


def dtype_slots(meta: Sequence[int]) -> list[int]:
    """Return the positions of the dtype ids in upstream's message of shapes.

    Layout: ``0, dtype, ndim, *shape`` or ``2, count, (dtype, ndim, *shape) * count``.
    """
    if meta[0] == 0:
        return [1]
    slots, position = [], 2
    for _ in range(meta[1]):
        slots.append(position)
        position += 2 + meta[position + 1]
    return slots


def set_marks(meta: Tensor, marks: Sequence[bool]) -> Tensor:
    """Copy the message of shapes, adding VALUES to the dtype ids of marked tensors."""
    marked = meta.clone()
    for slot, mark in zip(dtype_slots(meta.tolist()), marks, strict=True):
        if mark:
            marked[slot] += VALUES
    return marked


def take_marks(meta: Tensor, dtypes: Sequence[torch.dtype]) -> list[Agreed]:
    """Read the marks of a received message of shapes and remove them (mutates ``meta``)."""
    ids = meta.tolist()
    found = []
    for slot in dtype_slots(ids):
        found.append(Agreed(dtypes[ids[slot] % VALUES], ids[slot] >= VALUES))
        meta[slot] = ids[slot] % VALUES
    return found
