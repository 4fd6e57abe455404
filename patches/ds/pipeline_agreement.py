"""What two neighbouring pipeline stages agreed on; see ``pipeline``."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

#: added to the dtype id of a tensor that a codec may touch; upstream has 12 ids
VALUES = 1 << 16


@dataclass(frozen=True)
class Agreed:
    """One tensor of a set: the dtype that travels, and whether a codec may touch it."""

    dtype: torch.dtype
    values: bool


@dataclass(frozen=True)
class Agreement:
    """One set of tensors between two stages, and the gradients that come back for it."""

    activations: tuple[Agreed, ...]
    gradients: tuple[Agreed, ...]


@dataclass
class Neighbour:
    """What is agreed with one neighbour, and which tensor comes next."""

    agreed: Agreement | None = None
    #: sets whose gradients are still to come; micro-batches come back in the order they went
    waiting: deque[Agreement] = field(default_factory=deque)
    activation_index: int = 0
    gradient_index: int = 0

    def restart(self) -> None:
        """Begin a schedule: an evaluation leaves sets for which no gradient ever comes."""
        self.waiting.clear()
        self.activation_index = self.gradient_index = 0

    def activation(self) -> Agreed | None:
        """The next activation, None when nothing was agreed."""
        if self.agreed is None:
            return None
        if self.activation_index == 0:
            self.waiting.append(self.agreed)
        found = self.agreed.activations[self.activation_index]
        self.activation_index = (self.activation_index + 1) % len(self.agreed.activations)
        return found

    def gradient(self) -> Agreed | None:
        """The next gradient, None when nothing was agreed."""
        if self.agreed is None:
            return None
        gradients = self.waiting[0].gradients
        found = gradients[self.gradient_index]
        self.gradient_index = (self.gradient_index + 1) % len(gradients)
        if self.gradient_index == 0:
            self.waiting.popleft()
        return found


def dtype_slots(meta: Sequence[int]) -> list[int]:
    """Find where the dtype ids stand in upstream's message of shapes.

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
    """A copy of the message of shapes in which the dtype ids of marked tensors bear VALUES."""
    marked = meta.clone()
    for slot, mark in zip(dtype_slots(meta.tolist()), marks, strict=True):
        if mark:
            marked[slot] += VALUES
    return marked


def take_marks(meta: Tensor, dtypes: Sequence[torch.dtype]) -> list[Agreed]:
    """Read the marks of a received message of shapes and take them off (mutates ``meta``)."""
    ids = meta.tolist()
    found = []
    for slot in dtype_slots(ids):
        found.append(Agreed(dtypes[ids[slot] % VALUES], ids[slot] >= VALUES))
        meta[slot] = ids[slot] % VALUES
    return found
