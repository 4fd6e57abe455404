"""Sums of micro-batches inside the node, which cross between nodes once (``dp.accumulate``).

In two levels the ranks of a node sum a message and each of them gets a stretch of the node's sum.
In all micro-batches but the last of a step it stays there, in fp32, and upstream is given zeros; in
the last one it is added to what crosses. So each rank keeps its 1/L of the gradients, L ranks on a
node, and upstream's own sum over micro-batches is complete after the last one.

A message of the last micro-batch may hold other parameters than the ones before, whose stretches
were then cut elsewhere. What was kept of its parameters becomes part of this rank's gradients again
(``put_back``): the sum over the ranks of the node is the same. For parameters that the last
micro-batch does not use a seam has zeros reduced (``left``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridcomp.channels.pieces import Piece, places_of
from hybridcomp.codecs import Codec, make_codec
from hybridcomp.collectives import Group

#: carries the sums of messages that the block leaves native: exact, and without residuals
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
    """This rank's stretch of the sums of equal messages.

    Attributes:
        message: the message's pieces, which its key names by identity.
        pieces: those of the stretch; padding has no name.
        names: parameters of the whole message whose sums have not left yet; equal on all ranks of
            the message's group.
        total: fp32.
    """

    message: Pieces
    pieces: Sequence[Piece]
    names: set[str]
    total: Tensor


@dataclass(eq=False)
class NodeSums:
    """Keep this rank's part of its node's sums; empty between two optimizer steps.

    Attributes:
        has_kept: whether any message was kept since the engine began.
        is_told: whether the user was told that there was nothing to keep.
    """

    has_kept: bool = False
    is_told: bool = False
    _held: dict[tuple[object, ...], _Stretch] = field(default_factory=dict)

    @property
    def left(self) -> set[str]:
        """Return the names of parameters whose sums have not been sent to other nodes."""
        return {name for one in self._held.values() for name in one.names}

    @property
    def nbytes(self) -> int:
        """Return the bytes that are kept."""
        return sum(one.total.nbytes for one in self._held.values())

    def room(
        self, message: Pieces, group: Group, pieces: Callable[[], Sequence[Piece]], like: Tensor
    ) -> Tensor:
        """Return the sum so far of messages like this one, zeros before the first; to be added to.

        ``pieces``: makes those of this rank's stretch; ``like``: a tensor of the device.
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

        None where there is nothing, or parameters of it are in other messages too: ``put_back``.
        """
        key = _key(message, group)
        found = self._held.get(key)
        if found is None or found.names != _names(message):
            return None
        if any(one is not found and one.names & found.names for one in self._held.values()):
            return None
        return self._held.pop(key).total

    def holds(self, message: Pieces) -> bool:
        """Return whether anything is kept of the message's parameters; equal on all its ranks."""
        return bool(self._held) and not self.left.isdisjoint(_names(message))

    def put_back(self, message: Pieces, values: Tensor) -> None:
        """Add the kept sums of the message's parameters to its ``values``, fp32, and drop them."""
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
        """Forget what is kept of the parameters ``names``, None: of all."""
        if names is None:
            self._held.clear()
            return
        for key, one in list(self._held.items()):
            one.names.difference_update(names)
            if not one.names:
                del self._held[key]

    def idle(self) -> list[str]:
        """Return, once, a message for the user where nothing was kept before the first step."""
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
