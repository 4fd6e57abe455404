"""Error feedback: add the error of one quantization to the next message.

``original == sent + residual`` (Seide et al. 2014; Karimireddy et al. 2019). A residual belongs to
a stretch of a parameter's flattened gradient, never to a bucket: buckets may be cut differently
after a restart, parameters stay.

Memory: one value per gradient element that this rank encodes, plus one per element of the sum that
it owns and encodes again; of fp32, or of fewer bits (``codecs/quantized_residual.py``). Then
``original == sent + residual`` up to half a step of the residual's block for every message.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hybridcomp.codecs.quantized_residual import (
    QuantizedResidual,
    Residual,
    as_fp32,
    is_state,
    squared,
)
from hybridcomp.job import saved

#: ``sender``: error of encoding this rank's values (first hop).
#: ``owner``: error of encoding the sum that this rank owns (second hop).
Hop = Literal["sender", "owner"]
HOPS: tuple[Hop, ...] = ("sender", "owner")
#: in a saved state: key of the residuals that the ranks of a node hold in common
COMMON = "common"
#: where a stretch begins in its parameter, and its values
Held = tuple[int, Residual]
#: messages that are known by the identity of their pieces
MOST_KNOWN = 4096


class Piece(NamedTuple):
    """A stretch ``[offset, offset + numel)`` of one parameter's flattened gradient.

    Padding has the name "". A tuple, as buckets are known by their pieces at each message.
    """

    name: str
    offset: int
    numel: int


def cut(pieces: Iterable[Piece], start: int, stop: int) -> list[Piece]:
    """Return the pieces of elements ``[start, stop)`` of the flat tensor that ``pieces`` cover."""
    found, position = [], 0
    for piece in pieces:
        low, high = max(start, position), min(stop, position + piece.numel)
        if low < high:
            found.append(Piece(piece.name, piece.offset + low - position, high - low))
        position += piece.numel
    return found


def borders(pieces: Iterable[Piece]) -> list[int]:
    """Return the positions where another parameter begins in the tensor that ``pieces`` cover."""
    found: list[int] = []
    position, before = 0, None
    for piece in pieces:
        follows = before is not None and before.name == piece.name
        if before is not None and not (follows and before.offset + before.numel == piece.offset):
            found.append(position)
        position, before = position + piece.numel, piece
    return found


class _Place(NamedTuple):
    """Elements ``[low, stop)`` of a parameter, which begin at ``position`` of a flat tensor."""

    low: int
    stop: int
    position: int


class _Places:
    """Where a flat tensor has parts of one parameter, ordered by their offsets in it."""

    def __init__(self, places: Iterable[_Place]) -> None:
        self.every = sorted(places)
        self._lows = [place.low for place in self.every]
        self._longest = max(place.stop - place.low for place in self.every)

    def within(self, low: int, stop: int) -> Iterator[_Place]:
        """Yield what is in elements ``[low, stop)`` of the parameter, without walking the rest."""
        for place in self.every[bisect_left(self._lows, low - self._longest) :]:
            if place.low >= stop:
                return
            first, last = max(low, place.low), min(stop, place.stop)
            if first < last:
                yield _Place(first, last, place.position + first - place.low)


def _places_of(pieces: Iterable[Piece]) -> dict[str, _Places]:
    """Return the places of ``pieces``, which make a flat tensor, by name; without padding."""
    found: dict[str, list[_Place]] = {}
    position = 0
    for name, offset, numel in pieces:
        if name and numel:
            found.setdefault(name, []).append(_Place(offset, offset + numel, position))
        position += numel
    return {name: _Places(places) for name, places in found.items()}


@dataclass
class _Stretch:
    """One flat residual and the pieces that it covers, in order."""

    pieces: tuple[Piece, ...]
    flat: Residual

    @cached_property
    def places(self) -> dict[str, _Places]:
        """Where the parameters are in ``flat``, by name."""
        return _places_of(self.pieces)

    def saved(self) -> Iterator[tuple[str, tuple[int, Any]]]:
        """Yield name, offset and values as a checkpoint holds them, fp32 neighbours as one."""
        for name, places in self.places.items():
            joined: list[list[_Place]] = []
            for place in places.every:
                follows = bool(joined) and place.low == joined[-1][-1].stop
                if follows and isinstance(self.flat, Tensor):
                    joined[-1].append(place)
                else:
                    joined.append([place])
            for run in joined:
                parts = [self.flat[at : at + stop - low] for low, stop, at in run]
                whole = torch.cat(list(map(as_fp32, parts))) if len(parts) > 1 else parts[0]
                yield name, (run[0].low, _saved(whole))

    def parts(self) -> Iterator[tuple[Piece, Residual]]:
        position = 0
        for piece in self.pieces:
            yield piece, self.flat[position : position + piece.numel]
            position += piece.numel


@dataclass(frozen=True)
class NodeStretch:
    """Residual of a parameter from ``offset`` on of which ``count`` ranks of a node have a copy.

    In two levels a rank encodes a stretch of its node's sum, and only a message shows which one.
    So after a change of ranks every rank of the node starts with all residuals of the node; with
    each message it applies those of its stretch and forgets those of the other ranks' stretches.
    """

    offset: int
    values: Residual
    index: int  # of this rank among those that hold it
    count: int

    @property
    def own(self) -> Held:
        """Return this rank's share: the shares of the ``count`` ranks have each value once."""
        low, high = (self.values.numel() * i // self.count for i in (self.index, self.index + 1))
        return self.offset + low, self.values[low:high]


@dataclass
class Residuals:
    """All residuals of one engine on this rank.

    Values are moved, never copied, so that a checkpoint of all ranks holds each value once.

    Attributes:
        bits: of a value, any of ``quantized_residual.BITS``; 32: fp32.
    """

    bits: int = 32
    _stretches: dict[tuple[Hop, tuple[Piece, ...]], _Stretch] = field(default_factory=dict)
    #: loaded, not yet asked for: stretches of this rank, by hop and name
    _restored: dict[tuple[Hop, str], list[Held]] = field(default_factory=dict)
    #: loaded, not yet asked for: stretches that the ranks of a node have in common, by name
    _common: dict[str, list[NodeStretch]] = field(default_factory=dict)
    #: names of parameters for which this rank may hold residuals of the owner hop
    _owned: set[str] = field(default_factory=set)
    #: stretches that hold parts of a parameter, by hop and name, in the order of ``_stretches``
    _holders: dict[tuple[Hop, str], list[_Stretch]] = field(default_factory=dict)
    #: by hop and identity of a tuple of pieces, which is kept: a message of many ranks has many
    _known: dict[tuple[Hop, int], tuple[tuple[Piece, ...], _Stretch]] = field(default_factory=dict)

    def get(
        self,
        hop: Hop,
        pieces: Sequence[Piece],
        like: Tensor,
        *,
        last: bool = False,
        message: Sequence[Piece] = (),
    ) -> Residual:
        """Return the flat residual of these pieces, to be updated in place.

        Args:
            hop: which quantization.
            pieces: the stretches of parameters that the flat tensor consists of, in order. A tuple
                that comes back is not walked again.
            like: gives the device.
            last: no owner encodes the sum again, so residuals of the owner hop that this rank has
                from steps with two hops are added to this one.
            message: all pieces of the message; other ranks of this node encode those that are not
                in ``pieces``.
        """
        known = self._known.get((hop, id(pieces)))
        found = self._stretch(hop, pieces, like) if known is None else known[1]
        if hop == "owner":
            self._owned.update(found.places)
        elif last and not self._owned.isdisjoint(found.places):
            self._collect_all("owner", found)
        if self._common and hop == "sender":
            for name, places in _places_of(message).items():
                self._common_out_of(name, places, None)
        return found.flat

    def pair(
        self,
        pieces: Sequence[Piece],
        chunk: Sequence[Piece],
        like: Tensor,
        message: Sequence[Piece] = (),
    ) -> tuple[Residual, Residual]:
        """Return the residuals of a sum in two hops: the sender's of ``pieces``, the owner's.

        ``chunk``: the part of ``pieces`` that this rank owns. Where an earlier message was cut
        differently, owner residuals outside ``chunk`` are moved to the sender's.
        """
        known = self._known.get(("sender", id(pieces)))
        is_new = known is None and self._met("sender", pieces) is None
        owner = self.get("owner", chunk, like)
        sender = self.get("sender", pieces, like, message=message)
        if is_new:
            taker = self._stretches["sender", tuple(pieces)]
            self._collect_all("owner", taker, but=self._stretches["owner", tuple(chunk)])
        return sender, owner

    def _met(self, hop: Hop, pieces: Sequence[Piece]) -> _Stretch | None:
        """Return the stretch of these pieces, None for a first message."""
        found = self._stretches.get((hop, tuple(pieces)))
        if found is not None and isinstance(pieces, tuple):
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[hop, id(pieces)] = pieces, found
        return found

    def _stretch(self, hop: Hop, pieces: Sequence[Piece], like: Tensor) -> _Stretch:
        found = self._met(hop, pieces)
        if found is None:
            numel = sum(piece.numel for piece in pieces)
            flat = torch.zeros(numel, dtype=torch.float32, device=like.device)
            found = _Stretch(tuple(pieces), flat)
            self._collect_all(hop, found)
            if self.bits != 32:
                found.flat = QuantizedResidual.of(as_fp32(found.flat), self.bits)
            self._stretches[hop, found.pieces] = found
            for name in found.places:
                self._holders.setdefault((hop, name), []).append(found)
        return found

    def _collect_all(self, hop: Hop, taker: _Stretch, but: _Stretch | None = None) -> None:
        """Move all residuals of its pieces into ``taker``, so that each is applied only once."""
        for name, places in taker.places.items():
            for stretch in self._holders.get((hop, name), ()):
                if stretch is not taker and stretch is not but:
                    _move(stretch, taker, name)
            if (hop, name) in self._restored:
                left = _taken_out(self._restored.pop((hop, name)), places, taker.flat)
                if left:
                    self._restored[hop, name] = left
            if hop == "sender":
                self._common_out_of(name, places, taker.flat)

    def _common_out_of(self, name: str, places: _Places, flat: Residual | None) -> None:
        """Move the node's residual of a parameter to its ``places`` in ``flat``.

        None: drop it, as another rank has it.
        """
        left: list[NodeStretch] = []
        for one in self._common.pop(name, ()):
            rest = _taken_out([(one.offset, one.values)], places, flat)
            left += [replace(one, offset=offset, values=values) for offset, values in rest]
        if left:
            self._common[name] = left

    def scale(self, factor: float) -> None:
        """Multiply all residuals by ``factor``, by which the loss scale has changed."""
        for residual in self._all():
            residual.mul_(factor)

    def in_units(self, factor: Callable[[str], float]) -> None:
        """Multiply the loaded residuals by ``factor`` of their parameter's name."""
        for (_, name), stored in self._restored.items():
            for _, values in stored:
                values.mul_(factor(name))
        for name, common in self._common.items():
            for one in common:
                one.values.mul_(factor(name))

    def drop(self) -> None:
        """Set all residuals to zero: after an overflow they belong to a step that was skipped."""
        for stretch in self._stretches.values():
            stretch.flat.zero_()
        self._restored.clear()
        self._common.clear()

    def clear(self) -> None:
        """Drop all residuals and free their memory."""
        self.drop()
        for known in (self._stretches, self._holders, self._known, self._owned):
            known.clear()

    def _all(self) -> Iterator[Residual]:
        yield from (stretch.flat for stretch in self._stretches.values())
        yield from (values for stored in self._restored.values() for _, values in stored)
        yield from (one.values for stored in self._common.values() for one in stored)

    @property
    def is_restored(self) -> bool:
        """Return whether loaded residuals remain that no message has asked for."""
        return bool(self._restored or self._common)

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return sum(residual.nbytes for residual in self._all())

    def norm(self) -> float:
        """Return the L2 norm of all residuals of this rank; ranks of a node share common ones."""
        found = [stretch.flat for stretch in self._stretches.values()]
        found += [values for stored in self._restored.values() for _, values in stored]
        found += [one.own[1] for stored in self._common.values() for one in stored]
        return float(sum(map(squared, found)) ** 0.5)

    def state_dict(self) -> dict[str, dict[str, list[Any]]]:
        """Return ``{hop: {parameter: [(offset, values)]}}``, with unused loaded ones.

        Values are fp32 on the CPU, neighbours in a parameter as one, as the parts of all ranks in
        shards are; or what ``QuantizedResidual.state`` makes of each. ``COMMON``, if the node has
        any, holds ``{parameter: [(offset, values, index, count)]}``.
        """
        state: dict[str, dict[str, list[Any]]] = {hop: {} for hop in HOPS}
        for (hop, _), stretch in self._stretches.items():
            for name, held in stretch.saved():
                state[hop].setdefault(name, []).append(held)
        for (hop, name), stored in self._restored.items():
            state[hop].setdefault(name, []).extend((o, _saved(values)) for o, values in stored)
        if self._common:
            state[COMMON] = {
                name: [(one.offset, _saved(one.values), one.index, one.count) for one in stored]
                for name, stored in self._common.items()
            }
        return state

    def load(self, state: Mapping[str, Mapping[str, Sequence[Any]]]) -> None:
        """Load the state that the same rank saved, in place of all residuals here."""
        self.clear()
        for hop in HOPS:
            for name, stored in state[hop].items():
                self._restored[hop, name] = [(offset, _loaded(values)) for offset, values in stored]
        self._owned.update(state["owner"])
        for name, stored in state.get(COMMON, {}).items():
            self._common[name] = [
                NodeStretch(o, _loaded(values), index, count) for o, values, index, count in stored
            ]

    def add(self, name: str, stretch: tuple[int, Tensor], index: int = 0, count: int = 1) -> None:
        """Hold a stretch of a parameter, offset and fp32 CPU values, until a message asks for it.

        ``count`` ranks of this node hold the same one; this rank is number ``index`` among them.
        """
        offset, values = stretch
        held = values if self.bits == 32 else QuantizedResidual.of(values, self.bits)
        if count == 1:
            self._restored.setdefault(("sender", name), []).append((offset, held))
        else:
            self._common.setdefault(name, []).append(NodeStretch(offset, held, index, count))


def held_in(
    state: Mapping[str, Mapping[str, Sequence[Any]]],
) -> Iterator[tuple[str, tuple[int, Tensor]]]:
    """Yield names and stretches (offset, fp32 values) of one rank's saved state, of all hops.

    Summed over the states of all ranks they are the error that later messages have to make up for.
    """
    for hop in HOPS:
        for name, stored in state[hop].items():
            yield from ((name, (offset, as_fp32(_shared(values)))) for offset, values in stored)
    for name, stored in state.get(COMMON, {}).items():
        for offset, values, index, count in stored:
            first, own = NodeStretch(offset, _shared(values), index, count).own
            yield name, (first, as_fp32(own))


def is_stretch(value: Any) -> bool:
    """Return whether ``value`` is an offset and the finite values from there on.

    Residuals shared by a node have two more numbers: this rank's part, and the number of parts.
    """
    if not isinstance(value, (tuple, list)) or len(value) not in (2, 4):
        return False
    offset, values, *part = value
    if not saved.is_count(offset):
        return False
    if part and not (all(map(saved.is_count, part)) and part[0] < part[1]):
        return False
    if not isinstance(values, Tensor):
        return is_state(values)
    is_flat = values.dtype == torch.float32 and values.dim() == 1
    return is_flat and bool(values.isfinite().all())


def are_residuals(value: Any) -> bool:
    """Return whether ``value`` has the form of ``Residuals.state_dict``, with finite values."""
    if not isinstance(value, dict) or set(value) - {COMMON} != set(HOPS):
        return False
    return all(
        isinstance(by_name, dict)
        and all(isinstance(name, str) for name in by_name)
        and all(isinstance(found, (list, tuple)) for found in by_name.values())
        and all(is_stretch(one) for found in by_name.values() for one in found)
        for by_name in value.values()
    )


def _saved(values: Residual) -> Any:
    """Return a copy of ``values`` as a checkpoint holds them."""
    return values.cpu().clone() if isinstance(values, Tensor) else values.state()


def _shared(values: Any) -> Residual:
    """Return the residual in a checkpoint, fp32 as it is there."""
    return values if isinstance(values, Tensor) else QuantizedResidual.from_state(values)


def _loaded(values: Any) -> Residual:
    return values.clone() if isinstance(values, Tensor) else QuantizedResidual.from_state(values)


class Withheld:
    """Residuals of parameters whose sum nobody will take: they stay out of a message.

    The device alone knows which ones these are; the host waits for nothing.
    """

    def __init__(self, taken: Mapping[str, Tensor]) -> None:
        """``taken``: by name of a parameter a bool () on the device, whether its sum counts."""
        self._taken = taken
        self._kept: list[tuple[Residual, Tensor]] = []

    def take(self, flat: Residual | None, pieces: Sequence[Piece]) -> None:
        """Take what does not count out of ``flat``, the residual of ``pieces``: zeros stay."""
        if flat is None:
            return
        for piece, part in _Stretch(tuple(pieces), flat).parts():
            taken = self._taken.get(piece.name)
            if taken is not None:
                values = as_fp32(part)
                self._kept.append((part, values.masked_fill(taken, 0.0)))
                values.masked_fill_(~taken, 0.0)
                if isinstance(part, QuantizedResidual):
                    part.pack(values)

    def give_back(self) -> None:
        """Add them to the residual again, once the message has arrived."""
        for part, values in self._kept:
            part.add_(values)
        self._kept.clear()


def _taken_out(stored: Iterable[Held], places: _Places, flat: Residual | None) -> list[Held]:
    """Add what ``stored`` has of a parameter at its ``places`` in ``flat``; return the rest.

    None: drop it.
    """
    left: list[Held] = []
    for offset, source in stored:
        stop = offset + source.numel()
        taken: list[tuple[int, int]] = []
        done = offset
        for low, high, position in places.within(offset, stop):
            first = max(low, done)  # each value once, also where places overlap
            if first >= high:
                continue
            if flat is not None:
                found = as_fp32(source[first - offset : high - offset])
                at = position + first - low
                flat[at : at + high - first].add_(found.to(flat.device))
            taken.append((first, high))
            done = high
        if not taken:
            left.append((offset, source))
            continue
        edges = [offset, *(edge for both in taken for edge in both), stop]
        rest = zip(edges[::2], edges[1::2], strict=True)
        left += [(a, source[a - offset : b - offset].clone()) for a, b in rest if a < b]
    return left


def _move(source: _Stretch, taker: _Stretch, name: str) -> None:
    """Add the residual of a parameter in ``source`` to that in ``taker``, and zero it there."""
    for place in taker.places[name].every:
        for low, stop, position in source.places[name].within(place.low, place.stop):
            overlap = source.flat[position : position + stop - low]
            at = place.position + low - place.low
            part = taker.flat[at : at + stop - low]
            part.add_(as_fp32(overlap).to(part.device))
            overlap.zero_()
