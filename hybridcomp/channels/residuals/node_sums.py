"""Sums of micro-batches inside the node, which cross between nodes once (``dp.accumulate``).

In two levels the ranks of a node sum a message and each gets a slice of the node's sum. Until the
last micro-batch of a step it keeps the slice in fp32 and returns zeros to upstream; in the last one
it adds the kept sum to the message between nodes. So each rank keeps its 1/L of the gradients, L
ranks on a node, and upstream's own sum over micro-batches is complete after the last one.

A message of the last micro-batch may hold other parameters than earlier messages, whose slices were
then cut elsewhere. The sums kept for its parameters become part of this rank's gradients again
(``put_back``), which leaves the sum over the node unchanged. For parameters that the last
micro-batch does not use, the seam reduces zeros (``left``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridcomp.channels.residuals.pieces import Piece, places_of
from hybridcomp.codecs import Codec, make_codec
from hybridcomp.collectives import Group

#: codec of node sums that the block leaves native: exact, and without residuals
CARRIER: Codec = make_codec("expcode")
#: pieces of a message, in order; equal messages have the same object
Pieces = Sequence[Piece] | Sequence[Sequence[Piece]]
IDLE = (
    'dp: "accumulate": "node" had nothing to sum in this step: each backward pass was the last of '
    "a step. Of several micro-batches tell which is not: DeepSpeed by gradient_accumulation_steps, "
    "fully_shard by model.set_requires_all_reduce(False) before its forward pass, and "
    "set_requires_all_reduce(True) before that of the last"
)


@dataclass(eq=False)
class _Stretch:
    """This rank's slice of the sums of equal messages.

    Attributes:
        message: the message's pieces, kept alive because the key is their identity.
        pieces: pieces of the slice; padding has no name.
        names: parameters of the whole message whose sums were not sent to other nodes yet; equal on
            all ranks of the message's group.
        total: the sum so far, fp32.
    """

    message: Pieces
    pieces: Sequence[Piece]
    names: set[str]
    total: Tensor


@dataclass(eq=False)
class NodeSums:
    """Keep this rank's part of its node's sums; empty between two optimizer steps.

    Attributes:
        has_kept: whether any sum was kept since the engine started.
        is_told: whether the user was told that there was nothing to keep.
    """

    has_kept: bool = False
    is_told: bool = False
    _held: dict[tuple[object, ...], _Stretch] = field(default_factory=dict)

    @property
    def left(self) -> set[str]:
        """Return the names of parameters whose sums were not sent to other nodes yet."""
        return {name for one in self._held.values() for name in one.names}

    @property
    def nbytes(self) -> int:
        """Return the bytes that are kept."""
        return sum(one.total.nbytes for one in self._held.values())

    def room(
        self, message: Pieces, group: Group, pieces: Callable[[], Sequence[Piece]], like: Tensor
    ) -> Tensor:
        """Return the sum so far of messages like this one (zeros at first), to be added to.

        ``pieces``: returns the pieces of this rank's slice; ``like``: a tensor on the device.
        """
        key = _key(message, group)
        found = self._held.get(key)
        if found is None:
            own = pieces()
            numel = sum(piece.numel for piece in own)
            total = torch.zeros(numel, dtype=torch.float32, device=like.device)
            found = self._held[key] = _Stretch(message, own, _names(message), total)
        self.has_kept = True
        return found.total

    def take(self, message: Pieces, group: Group) -> Tensor | None:
        """Remove and return the sum kept of messages like this one.

        Returns None if no such sum is kept, or if sums of some of its parameters are also kept for
        other messages; then use ``put_back``.
        """
        key = _key(message, group)
        found = self._held.get(key)
        if found is None or found.names != _names(message):
            return None
        if any(one is not found and one.names & found.names for one in self._held.values()):
            return None
        return self._held.pop(key).total

    def holds(self, message: Pieces) -> bool:
        """Return whether a sum of any of the message's parameters is kept; equal on its ranks."""
        return bool(self._held) and not self.left.isdisjoint(_names(message))

    def put_back(self, message: Pieces, values: Tensor) -> None:
        """Add the kept sums of the message's parameters to ``values``, fp32, and drop the sums."""
        flat, names = list(_flat(message)), _names(message)
        places = places_of(flat)
        for one in self._held.values():
            position = 0
            for name, offset, numel in one.pieces:
                if name in places and name in one.names:
                    for low, stop, at in places[name].within(offset, offset + numel):
                        first = position + low - offset
                        values[at : at + stop - low].add_(one.total[first : first + stop - low])
                position += numel
        self.drop(names)

    def drop(self, names: Collection[str] | None = None) -> None:
        """Drop the sums kept for the parameters ``names``; None: for all."""
        if names is None:
            self._held.clear()
            return
        for key, one in list(self._held.items()):
            one.names.difference_update(names)
            if not one.names:
                del self._held[key]

    def idle(self) -> list[str]:
        """Return, once, a message for the user if no sum was kept before the first step."""
        told, self.is_told = self.is_told or self.has_kept, True
        return [] if told else [IDLE]


def _key(message: Pieces, group: Group) -> tuple[object, ...]:
    return group.global_ranks, id(message)


def _flat(message: Pieces) -> Iterable[Piece]:
    for one in message:
        if isinstance(one, Piece):
            yield one
        else:
            yield from one


def _names(message: Pieces) -> set[str]:
    return {piece.name for piece in _flat(message) if piece.name}
