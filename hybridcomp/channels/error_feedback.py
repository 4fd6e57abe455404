"""Error feedback: what a quantization left out is added to the next message.

``original == sent + residual`` (Seide et al. 2014; Karimireddy et al. 2019). A residual belongs to
a stretch of a parameter's flattened gradient, never to a bucket: buckets may be cut differently
after a restart, parameters stay.

Memory: one fp32 value per gradient element that this rank encodes, plus one per element of the sum
that it owns and encodes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

#: ``sender``: left out when this rank's own values were encoded (first hop).
#: ``owner``: left out when the sum that this rank owns was encoded (second hop).
Hop = Literal["sender", "owner"]
HOPS: tuple[Hop, ...] = ("sender", "owner")
#: in a saved state: what the ranks of a node hold in common
COMMON = "common"
#: where a stretch begins in its parameter, and its values
Held = tuple[int, Tensor]


@dataclass(frozen=True)
class Piece:
    """A stretch ``[offset, offset + numel)`` of one parameter's flattened gradient.

    Padding has the name "".
    """

    name: str
    offset: int
    numel: int


def cut(pieces: Iterable[Piece], start: int, stop: int) -> list[Piece]:
    """The pieces of elements ``[start, stop)`` of the flat tensor that ``pieces`` cover."""
    found, position = [], 0
    for piece in pieces:
        low, high = max(start, position), min(stop, position + piece.numel)
        if low < high:
            found.append(Piece(piece.name, piece.offset + low - position, high - low))
        position += piece.numel
    return found


def borders(pieces: Iterable[Piece]) -> list[int]:
    """Find where another parameter begins in the flat tensor that ``pieces`` cover."""
    found: list[int] = []
    position, before = 0, None
    for piece in pieces:
        follows = before is not None and before.name == piece.name
        if before is not None and not (follows and before.offset + before.numel == piece.offset):
            found.append(position)
        position, before = position + piece.numel, piece
    return found


@dataclass
class _Stretch:
    """One flat residual and the pieces that it covers, in order."""

    pieces: tuple[Piece, ...]
    flat: Tensor  # fp32

    def parts(self) -> Iterator[tuple[Piece, Tensor]]:
        position = 0
        for piece in self.pieces:
            yield piece, self.flat[position : position + piece.numel]
            position += piece.numel


@dataclass(frozen=True)
class NodeStretch:
    """Values of a parameter from ``offset`` on that ``count`` ranks of a node hold alike.

    In two levels a rank encodes a stretch of its node's sum, and which one that is shows only in
    the message. So after a change of ranks every rank of the node begins with all that the node
    has, takes its stretch out of a message, and forgets what the others take out of it.
    """

    offset: int
    values: Tensor  # fp32
    index: int  # of this rank among those that hold it
    count: int

    @property
    def own(self) -> Held:
        """The part that counts as this rank's: over the ranks that hold it every value is once."""
        low, high = (self.values.numel() * i // self.count for i in (self.index, self.index + 1))
        return self.offset + low, self.values[low:high]


@dataclass
class Residuals:
    """All residuals of one engine on this rank.

    Values are moved, never copied: over all ranks each counts once, whenever it is saved.
    """

    _stretches: dict[tuple[Hop, tuple[Piece, ...]], _Stretch] = field(default_factory=dict)
    #: loaded, not yet asked for: stretches of this rank, by hop and name
    _restored: dict[tuple[Hop, str], list[Held]] = field(default_factory=dict)
    #: loaded, not yet asked for: stretches that the ranks of a node have in common, by name
    _common: dict[str, list[NodeStretch]] = field(default_factory=dict)
    #: names of which this rank may hold what an owner left out
    _owned: set[str] = field(default_factory=set)

    def get(
        self,
        hop: Hop,
        pieces: Sequence[Piece],
        like: Tensor,
        *,
        last: bool = False,
        message: Sequence[Piece] = (),
    ) -> Tensor:
        """The flat fp32 residual of these pieces, to be updated in place.

        Args:
            hop: which quantization.
            pieces: what the flat tensor is made of, in order.
            like: gives the device.
            last: no owner encodes the sum again. What this rank's owner hop has left out of it, in
                steps of two hops, then belongs to this one.
            message: all pieces of the message, of which other ranks of this node encode those that
                are not in ``pieces``.
        """
        found = self._stretch(hop, pieces, like)
        if hop == "owner":
            self._owned.update(piece.name for piece in pieces)
        elif last and any(piece.name in self._owned for piece in pieces):
            self._collect_all("owner", found)
        if self._common and hop == "sender":
            for piece in message:
                self._common_out_of(piece, None)
        return found.flat

    def pair(
        self,
        pieces: Sequence[Piece],
        chunk: Sequence[Piece],
        like: Tensor,
        message: Sequence[Piece] = (),
    ) -> tuple[Tensor, Tensor]:
        """Give the residuals of a sum in two hops: the sender's of ``pieces``, the owner's.

        ``chunk``: what of ``pieces`` this rank owns; what it owned of the others in a message that
        was cut differently joins what it sends.
        """
        is_new = ("sender", tuple(pieces)) not in self._stretches
        owner = self.get("owner", chunk, like)
        sender = self.get("sender", pieces, like, message=message)
        if is_new:
            taker = self._stretches["sender", tuple(pieces)]
            self._collect_all("owner", taker, but=self._stretches["owner", tuple(chunk)])
        return sender, owner

    def _stretch(self, hop: Hop, pieces: Sequence[Piece], like: Tensor) -> _Stretch:
        key = (hop, tuple(pieces))
        found = self._stretches.get(key)
        if found is None:
            numel = sum(piece.numel for piece in pieces)
            found = _Stretch(key[1], torch.zeros(numel, dtype=torch.float32, device=like.device))
            self._collect_all(hop, found)
            self._stretches[key] = found
        return found

    def _collect_all(self, hop: Hop, taker: _Stretch, but: _Stretch | None = None) -> None:
        """Move into ``taker`` what is known of its pieces: each residual is applied only once."""
        for piece, part in taker.parts():
            if not piece.name:
                continue
            for (other_hop, _), stretch in self._stretches.items():
                if other_hop == hop and stretch is not taker and stretch is not but:
                    for other, source in stretch.parts():
                        if other.name == piece.name:
                            _move(piece, part, other.offset, source)
            if (hop, piece.name) in self._restored:
                left = _taken_out(self._restored.pop((hop, piece.name)), piece, part)
                if left:
                    self._restored[hop, piece.name] = left
            if hop == "sender":
                self._common_out_of(piece, part)

    def _common_out_of(self, piece: Piece, part: Tensor | None) -> None:
        """Move what the node has of ``piece`` into ``part``; None: another rank of it does."""
        left: list[NodeStretch] = []
        for one in self._common.pop(piece.name, ()):
            rest = _taken_out([(one.offset, one.values)], piece, part)
            left += [replace(one, offset=offset, values=values) for offset, values in rest]
        if left:
            self._common[piece.name] = left

    def scale(self, factor: float) -> None:
        """Follow a change of the loss scale."""
        for tensor in self._tensors():
            tensor.mul_(factor)

    def in_units(self, factor: Callable[[str], float]) -> None:
        """Multiply what was loaded by ``factor`` of its parameter's name."""
        for (_, name), stored in self._restored.items():
            for _, values in stored:
                values.mul_(factor(name))
        for name, common in self._common.items():
            for one in common:
                one.values.mul_(factor(name))

    def drop(self) -> None:
        """Forget everything: after an overflow the residuals belong to a step that never was."""
        for stretch in self._stretches.values():
            stretch.flat.zero_()
        self._restored.clear()
        self._common.clear()

    def clear(self) -> None:
        """Forget everything and free the memory: nothing will be encoded any more."""
        self.drop()
        self._stretches.clear()
        self._owned.clear()

    def _tensors(self) -> Iterator[Tensor]:
        yield from (stretch.flat for stretch in self._stretches.values())
        yield from (tensor for stored in self._restored.values() for _, tensor in stored)
        yield from (one.values for stored in self._common.values() for one in stored)

    @property
    def is_restored(self) -> bool:
        """Whether anything was loaded that no message has asked for."""
        return bool(self._restored or self._common)

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def norm(self) -> float:
        """L2 norm of all residuals of this rank; what a node has in common counts once."""
        found = [stretch.flat for stretch in self._stretches.values()]
        found += [tensor for stored in self._restored.values() for _, tensor in stored]
        found += [one.own[1] for stored in self._common.values() for one in stored]
        return float(sum(float(t.double().square().sum()) for t in found) ** 0.5)

    def state_dict(self) -> dict[str, dict[str, list[Any]]]:
        """``{hop: {parameter: [(offset, fp32 CPU tensor)]}}``, what was loaded but unused too.

        Where there is any, COMMON has ``{parameter: [(offset, tensor, index, count)]}``.
        """
        state: dict[str, dict[str, list[Any]]] = {hop: {} for hop in HOPS}
        for (hop, _), stretch in self._stretches.items():
            for piece, part in stretch.parts():
                if piece.name:
                    state[hop].setdefault(piece.name, []).append((piece.offset, part.cpu().clone()))
        for (hop, name), stored in self._restored.items():
            state[hop].setdefault(name, []).extend((o, t.cpu().clone()) for o, t in stored)
        if self._common:
            state[COMMON] = {
                name: [(one.offset, one.values.clone(), one.index, one.count) for one in stored]
                for name, stored in self._common.items()
            }
        return state

    def load(self, state: Mapping[str, Mapping[str, Sequence[Any]]]) -> None:
        """Take over the state of this same rank; replaces everything held."""
        self.clear()
        for hop in HOPS:
            for name, stored in state[hop].items():
                self._restored[hop, name] = [(offset, t.clone()) for offset, t in stored]
        self._owned.update(state["owner"])
        for name, stored in state.get(COMMON, {}).items():
            self._common[name] = [
                NodeStretch(o, t.clone(), index, count) for o, t, index, count in stored
            ]

    def add(self, name: str, stretch: Held, index: int = 0, count: int = 1) -> None:
        """Hold a stretch of fp32 CPU values of a parameter until a message asks for it.

        ``count`` ranks of this node hold the same one, this rank is the ``index``-th of them.
        """
        if count == 1:
            self._restored.setdefault(("sender", name), []).append(stretch)
        else:
            self._common.setdefault(name, []).append(NodeStretch(*stretch, index, count))


def held_in(state: Mapping[str, Mapping[str, Sequence[Any]]]) -> Iterator[tuple[str, Held]]:
    """The names and stretches of one rank's saved state, of all hops.

    Over the states of all ranks their sum is what gradients still miss.
    """
    for hop in HOPS:
        for name, stored in state[hop].items():
            yield from ((name, (offset, tensor)) for offset, tensor in stored)
    for name, stored in state.get(COMMON, {}).items():
        yield from ((name, NodeStretch(*one).own) for one in stored)


class Withheld:
    """Residuals of parameters whose sum nobody will take: they stay out of a message.

    The device alone knows which ones these are; the host waits for nothing.
    """

    def __init__(self, taken: Mapping[str, Tensor]) -> None:
        """``taken``: by name of a parameter a bool () on the device, whether its sum counts."""
        self._taken = taken
        self._kept: list[tuple[Tensor, Tensor]] = []

    def take(self, flat: Tensor | None, pieces: Sequence[Piece]) -> None:
        """Take what does not count out of ``flat``, the residual of ``pieces``: zeros stay."""
        if flat is None:
            return
        for piece, part in _Stretch(tuple(pieces), flat).parts():
            taken = self._taken.get(piece.name)
            if taken is not None:
                self._kept.append((part, part.masked_fill(taken, 0.0)))
                part.masked_fill_(~taken, 0.0)

    def give_back(self) -> None:
        """Add it again, when the message has arrived."""
        for part, values in self._kept:
            part.add_(values)
        self._kept.clear()


def _taken_out(stored: Iterable[Held], piece: Piece, part: Tensor | None) -> list[Held]:
    """Add what ``stored`` has of ``piece`` to ``part``; returns what is left, the rest is freed."""
    left: list[Held] = []
    for offset, source in stored:
        low = max(piece.offset, offset)
        high = min(piece.offset + piece.numel, offset + source.numel())
        if low >= high:
            left.append((offset, source))
            continue
        if part is not None:
            _move(piece, part, offset, source)
        before, behind = source[: low - offset], source[high - offset :]
        left += [(at, rest.clone()) for at, rest in ((offset, before), (high, behind)) if len(rest)]
    return left


def _move(piece: Piece, part: Tensor, offset: int, source: Tensor) -> None:
    """Add the overlap of ``source`` (which starts at ``offset``) to ``part`` and zero it there."""
    low = max(piece.offset, offset)
    high = min(piece.offset + piece.numel, offset + source.numel())
    if low < high:
        overlap = source[low - offset : high - offset]
        part[low - piece.offset : high - piece.offset] += overlap.to(part.device)
        overlap.zero_()
