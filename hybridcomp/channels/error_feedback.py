"""Error feedback: what a quantization left out is added to the next message.

``original == sent + residual`` (Seide et al. 2014; Karimireddy et al. 2019). A residual belongs to
a stretch of a parameter's flattened gradient, never to a bucket: buckets may be cut differently
after a restart, parameters stay.

Memory: one fp32 value per gradient element that this rank encodes, plus one per element of the sum
that it owns and encodes again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

#: ``sender``: left out when this rank's own values were encoded (first hop).
#: ``owner``: left out when the sum that this rank owns was encoded (second hop).
Hop = Literal["sender", "owner"]
HOPS: tuple[Hop, ...] = ("sender", "owner")


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


@dataclass
class Residuals:
    """All residuals of one engine on this rank."""

    _stretches: dict[tuple[Hop, tuple[Piece, ...]], _Stretch] = field(default_factory=dict)
    #: loaded, not yet asked for: exact stretches of this rank, by hop and name
    _restored: dict[tuple[Hop, str], list[tuple[int, Tensor]]] = field(default_factory=dict)
    #: loaded from another number of ranks: the sum over all ranks and hops, by name
    _shared: dict[str, Tensor] = field(default_factory=dict)

    def get(
        self,
        hop: Hop,
        pieces: Sequence[Piece],
        world_size: int,
        like: Tensor,
        *,
        last: bool = False,
    ) -> Tensor:
        """The flat fp32 residual of these pieces, to be updated in place.

        Args:
            hop: which quantization.
            pieces: what the flat tensor is made of, in order.
            world_size: ranks of the group that reduces it; a sum that was loaded from another
                number of ranks is shared evenly among them.
            like: gives the device.
            last: no owner encodes the sum again. What this rank's owner hop had left out of it, in
                a run that was saved in two hops, then belongs to this one.
        """
        key = (hop, tuple(pieces))
        if key not in self._stretches:
            numel = sum(piece.numel for piece in pieces)
            stretch = _Stretch(key[1], torch.zeros(numel, dtype=torch.float32, device=like.device))
            for piece, part in stretch.parts():
                for source in HOPS if last else (hop,):
                    self._collect(source, piece, part, world_size)
            self._stretches[key] = stretch
        return self._stretches[key].flat

    def _collect(self, hop: Hop, piece: Piece, part: Tensor, world_size: int) -> None:
        """Move into ``part`` what is known of ``piece``: each residual is applied only once."""
        if not piece.name:
            return
        for (other_hop, _), stretch in self._stretches.items():
            if other_hop == hop:
                for other, source in stretch.parts():
                    if other.name == piece.name:
                        _move(piece, part, other.offset, source)
        for offset, source in self._restored.get((hop, piece.name), ()):
            _move(piece, part, offset, source)
        if hop == "sender" and piece.name in self._shared:
            _move(piece, part, 0, self._shared[piece.name], 1.0 / world_size)

    def scale(self, factor: float) -> None:
        """Follow a change of the loss scale."""
        for tensor in self._tensors():
            tensor.mul_(factor)

    def drop(self) -> None:
        """Forget everything: after an overflow the residuals belong to a step that never was."""
        for stretch in self._stretches.values():
            stretch.flat.zero_()
        self._restored.clear()
        self._shared.clear()

    def clear(self) -> None:
        """Forget everything and free the memory: nothing will be encoded any more."""
        self.drop()
        self._stretches.clear()

    def _tensors(self) -> Iterator[Tensor]:
        yield from (stretch.flat for stretch in self._stretches.values())
        yield from (tensor for stored in self._restored.values() for _, tensor in stored)
        yield from self._shared.values()

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def norm(self) -> float:
        """L2 norm of all residuals of this rank."""
        squares = [float(t.double().square().sum()) for t in self._tensors()]
        return float(sum(squares) ** 0.5)

    def state_dict(self) -> dict[Hop, dict[str, list[tuple[int, Tensor]]]]:
        """``{hop: {parameter: [(offset, fp32 CPU tensor)]}}``, what was loaded but unused too."""
        state: dict[Hop, dict[str, list[tuple[int, Tensor]]]] = {hop: {} for hop in HOPS}
        for (hop, _), stretch in self._stretches.items():
            for piece, part in stretch.parts():
                if piece.name:
                    state[hop].setdefault(piece.name, []).append((piece.offset, part.cpu().clone()))
        for (hop, name), stored in self._restored.items():
            state[hop].setdefault(name, []).extend((o, t.cpu().clone()) for o, t in stored)
        for name, tensor in self._shared.items():
            state["sender"].setdefault(name, []).append((0, tensor.cpu().clone()))
        return state

    def load(self, state: Mapping[Hop, Mapping[str, Sequence[tuple[int, Tensor]]]]) -> None:
        """Take over the state of this same rank; replaces everything held."""
        self._stretches.clear()
        self.drop()
        for hop in HOPS:
            for name, stored in state[hop].items():
                self._restored[hop, name] = [(offset, t.clone()) for offset, t in stored]

    def load_sum(self, states: Iterable[Mapping[Hop, Mapping[str, Any]]]) -> None:
        """Take over the states of all ranks of a job of another size; replaces everything held.

        What must survive is the sum over ranks and hops: it is what the gradients still miss.
        """
        self._stretches.clear()
        self.drop()
        for state in states:
            for hop in HOPS:
                for name, stored in state[hop].items():
                    for offset, tensor in stored:
                        self._add_shared(name, offset, tensor)

    def _add_shared(self, name: str, offset: int, tensor: Tensor) -> None:
        total = self._shared.get(name)
        end = offset + tensor.numel()
        if total is None or total.numel() < end:
            grown = torch.zeros(end, dtype=torch.float32)
            if total is not None:
                grown[: total.numel()] = total
            total = self._shared[name] = grown
        total[offset:end] += tensor


def _move(piece: Piece, part: Tensor, offset: int, source: Tensor, share: float = 1.0) -> None:
    """Add the overlap of ``source`` (which starts at ``offset``) to ``part`` and zero it there."""
    low = max(piece.offset, offset)
    high = min(piece.offset + piece.numel, offset + source.numel())
    if low < high:
        overlap = source[low - offset : high - offset]
        part[low - piece.offset : high - piece.offset] += overlap.to(part.device) * share
        overlap.zero_()
