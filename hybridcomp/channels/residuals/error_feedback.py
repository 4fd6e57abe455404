"""Error feedback: add the error of one quantization to the next message.

``original == sent + residual`` (Seide et al. 2014; Karimireddy et al. 2019). A residual belongs to
a slice of a parameter's flattened gradient, never to a bucket: buckets may be cut differently after
a restart, but parameters stay.

Memory: one value per gradient element that this rank encodes, plus one per element of the sum that
it owns and encodes again. Values are fp32, or of fewer bits (``codecs/quantized_residual.py``):
then ``original == sent + residual`` holds only up to half a step of the residual's block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hybridcomp.channels.residuals.pieces import (
    Piece,
    Places,
    ResidualStretch,
    are_too_often,
    move_residual,
    places_of,
    taken_out,
)
from hybridcomp.channels.residuals.saved_residuals import (
    COMMON,
    HOPS,
    Held,
    Hop,
    NodeStretch,
    copy_of,
    for_checkpoint,
    held_in,
)
from hybridcomp.codecs import read_together
from hybridcomp.codecs.quantized_residual import (
    QuantizedResidual,
    Residual,
    as_fp32,
    squares,
)

#: maximum messages recognized by the identity of their pieces
MOST_KNOWN = 4096


@dataclass
class Residuals:
    """All residuals of one engine on this rank.

    Values are moved, never copied, so that a checkpoint of all ranks holds each value once. If
    messages hold other parameters in every step (an expert without tokens has no gradient), old
    slices are freed.

    Attributes:
        bits: bits per residual value, one of ``quantized_residual.BITS``; 32: fp32.
    """

    bits: int = 32
    _stretches: dict[tuple[Hop, tuple[Piece, ...]], ResidualStretch] = field(default_factory=dict)
    #: loaded, not yet used: slices of this rank, by hop and name
    _restored: dict[tuple[Hop, str], list[Held]] = field(default_factory=dict)
    #: loaded, not yet used: slices that the ranks of a node share, by name
    _common: dict[str, list[NodeStretch]] = field(default_factory=dict)
    #: names of parameters for which this rank may hold residuals of the owner hop
    _owned: set[str] = field(default_factory=set)
    #: slices that cover a parameter, by hop and name, in the order of ``_stretches``
    _holders: dict[tuple[Hop, str], list[ResidualStretch]] = field(default_factory=dict)
    #: slices by hop and id of a tuple of pieces (also kept alive); iterating over the pieces of
    #: many ranks is slow
    _known: dict[tuple[Hop, int], tuple[tuple[Piece, ...], ResidualStretch]] = field(
        default_factory=dict
    )

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
                that was passed before is recognized by its identity.
            like: a tensor on the device of the residual.
            last: no owner encodes this message's sum again. Residuals that this rank kept as owner
                in earlier messages of two hops are then added to the returned residual.
            message: all pieces of the message; other ranks of this node encode those that are not
                in ``pieces``.
        """
        known = self._known.get((hop, id(pieces)))
        found = self._stretch(hop, pieces, like) if known is None else known[1]
        if last and hop != "owner" and not self._owned.isdisjoint(found.places):
            self._collect_all("owner", found)
        if self._common and hop == "sender":
            for name, places in places_of(message).items():
                self._common_out_of(name, places, None)
        return found.flat

    def pair(
        self,
        pieces: Sequence[Piece],
        chunk: Sequence[Piece],
        like: Tensor,
        message: Sequence[Piece] = (),
    ) -> tuple[Residual, Residual]:
        """Return the residuals of a two-hop sum: for ``pieces`` and, as owner, for ``chunk``.

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

    def _met(self, hop: Hop, pieces: Sequence[Piece]) -> ResidualStretch | None:
        """Return the slice last used for these pieces; None for a first message."""
        found = self._stretches.get((hop, tuple(pieces)))
        if found is not None and isinstance(pieces, tuple):
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[hop, id(pieces)] = pieces, found
        return found

    def _stretch(self, hop: Hop, pieces: Sequence[Piece], like: Tensor) -> ResidualStretch:
        found = self._met(hop, pieces)
        if found is None:
            numel = sum(piece.numel for piece in pieces)
            flat = torch.zeros(numel, dtype=torch.float32, device=like.device)
            found = ResidualStretch(tuple(pieces), flat)
            self._collect_all(hop, found)
            if self.bits != 32:
                found.flat = QuantizedResidual.of(as_fp32(found.flat), self.bits)
            self._stretches[hop, found.pieces] = found
            if hop == "owner":
                self._owned.update(found.places)
            for name in found.places:
                self._holders.setdefault((hop, name), []).append(found)
            self._free_oldest(hop, found)
        return found

    def _free_oldest(self, hop: Hop, newest: ResidualStretch) -> None:
        """Free the oldest slices that overlap ``newest``, while too many slices hold its values.

        Pending messages use none of these slices: their parameters differ.
        """
        while are_too_often({name: self._holders[hop, name] for name in newest.places}):
            every = (stretch for (other, _), stretch in self._stretches.items() if other == hop)
            oldest = next(one for one in every if not newest.places.keys().isdisjoint(one.places))
            if oldest is newest:
                return
            self._free(hop, oldest)

    def _free(self, hop: Hop, stretch: ResidualStretch) -> None:
        """Free a slice; move its values to other slices, or keep them for a later message."""
        del self._stretches[hop, stretch.pieces]
        self._known = {key: both for key, both in self._known.items() if both[1] is not stretch}
        for name in stretch.places:
            others = [one for one in self._holders[hop, name] if one is not stretch]
            self._holders[hop, name] = others
            if rest := list(stretch.left_to(others[::-1], name)):
                self._restored.setdefault((hop, name), []).extend(rest)

    def _collect_all(
        self, hop: Hop, taker: ResidualStretch, but: ResidualStretch | None = None
    ) -> None:
        """Move all residuals of ``taker``'s pieces into it, so that each is applied only once."""
        for name, places in taker.places.items():
            for stretch in self._holders.get((hop, name), ()):
                if stretch is not taker and stretch is not but:
                    move_residual(stretch, taker, name)
            if (hop, name) in self._restored:
                left = taken_out(self._restored.pop((hop, name)), places, taker.flat)
                if left:
                    self._restored[hop, name] = left
            if hop == "sender":
                self._common_out_of(name, places, taker.flat)

    def _common_out_of(self, name: str, places: Places, flat: Residual | None) -> None:
        """Move the node's residual of a parameter to its ``places`` in ``flat``.

        ``flat`` None: drop the residual, because another rank has it.
        """
        left: list[NodeStretch] = []
        for one in self._common.pop(name, ()):
            rest = taken_out([(one.offset, one.values)], places, flat)
            left += [replace(one, offset=offset, values=values) for offset, values in rest]
        if left:
            self._common[name] = left

    def scale(self, factor: float) -> None:
        """Multiply all residuals by ``factor``, the change of the loss scale."""
        for residual in self._all():
            residual.mul_(factor)

    def in_units(self, factor: Callable[[str], float]) -> None:
        """Multiply each loaded residual by ``factor(name)``, where ``name`` is its parameter's."""
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

    def forget(self, is_of: Callable[[str], bool]) -> float:
        """Free residuals of parameters for which ``is_of(name)``; return their norm on this rank.

        The other residuals are moved to host memory and loaded by the next message that needs them.
        """
        state = self.state_dict()
        gone = {hop: {n: held for n, held in names.items() if is_of(n)}
                for hop, names in state.items()}  # fmt: skip
        if not any(gone.values()):
            return 0.0
        for hop, names in gone.items():
            for name in names:
                del state[hop][name]
        self.load(state)
        squared = sum(float(values.square().sum()) for _, (_, values) in held_in(gone))
        return float(squared**0.5)

    def clear(self) -> None:
        """Drop all residuals and free their memory; leave the tensors themselves unchanged."""
        for known in (
            self._stretches, self._holders, self._known, self._owned, self._restored, self._common,
        ):  # fmt: skip
            known.clear()

    def _all(self) -> Iterator[Residual]:
        yield from (stretch.flat for stretch in self._stretches.values())
        yield from (values for stored in self._restored.values() for _, values in stored)
        yield from (entry.values for stored in self._common.values() for entry in stored)

    @property
    def is_restored(self) -> bool:
        """Return whether loaded residuals remain that no message has asked for."""
        return bool(self._restored or self._common)

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory held."""
        return sum(residual.nbytes for residual in self._all())

    def norm(self) -> float:
        """Return the L2 norm of this rank's residuals, with its share of those of its node."""
        found = [stretch.flat for stretch in self._stretches.values()]
        found += [values for stored in self._restored.values() for _, values in stored]
        found += [entry.own[1] for stored in self._common.values() for entry in stored]
        rows = read_together([squares(residual).view(1) for residual in found])
        return float(sum(square for (square,) in rows) ** 0.5)

    def state_dict(self) -> dict[str, dict[str, list[Any]]]:
        """Return ``{hop: {parameter: [(offset, values)]}}``, with unused loaded ones.

        Values are fp32 on the CPU, with neighbouring slices of a parameter joined; or the result of
        ``QuantizedResidual.state`` for each slice. ``COMMON``, if the node has any, holds
        ``{parameter: [(offset, values, index, count)]}``.
        """
        state: dict[str, dict[str, list[Any]]] = {hop: {} for hop in HOPS}
        for (hop, _), stretch in self._stretches.items():
            for name, held in stretch.saved():
                state[hop].setdefault(name, []).append(held)
        for (hop, name), stored in self._restored.items():
            state[hop].setdefault(name, []).extend(
                (o, for_checkpoint(values)) for o, values in stored
            )
        if self._common:
            state[COMMON] = {
                name: [
                    (entry.offset, for_checkpoint(entry.values), entry.index, entry.count)
                    for entry in stored
                ]
                for name, stored in self._common.items()
            }
        return state

    def load(self, state: Mapping[str, Mapping[str, Sequence[Any]]]) -> None:
        """Replace all residuals here with the state that this rank saved."""
        self.clear()
        for hop in HOPS:
            for name, stored in state[hop].items():
                self._restored[hop, name] = [(offset, copy_of(values)) for offset, values in stored]
        self._owned.update(state["owner"])
        for name, stored in state.get(COMMON, {}).items():
            self._common[name] = [
                NodeStretch(o, copy_of(values), index, count) for o, values, index, count in stored
            ]

    def add(self, name: str, stretch: tuple[int, Tensor], index: int = 0, count: int = 1) -> None:
        """Keep the residual of a slice of a parameter (offset, fp32 CPU values) for a message.

        ``count`` ranks of this node hold the same residual; this rank is number ``index`` of them.
        """
        offset, values = stretch
        held = values if self.bits == 32 else QuantizedResidual.of(values, self.bits)
        if count == 1:
            self._restored.setdefault(("sender", name), []).append((offset, held))
        else:
            self._common.setdefault(name, []).append(NodeStretch(offset, held, index, count))
