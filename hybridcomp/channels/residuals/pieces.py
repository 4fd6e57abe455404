"""Describe the parameter slices that a flat tensor holds, and their positions in it.

A residual belongs to a slice of a parameter's flattened gradient: buckets may be cut differently
after a restart, but parameters stay.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridcomp.channels.residuals.saved_residuals import Held, for_checkpoint
from hybridcomp.codecs.quantized_residual import Residual, as_fp32

#: maximum average number of slices that hold a parameter's value
MOST_HELD = 2


class Piece(NamedTuple):
    """A slice ``[offset, offset + numel)`` of one parameter's flattened gradient.

    Padding has the name "". It is a tuple so that buckets can be recognized quickly by their
    pieces.
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
    """Return the positions in the tensor of ``pieces`` where a new parameter begins."""
    found: list[int] = []
    position, before = 0, None
    for piece in pieces:
        follows = before is not None and before.name == piece.name
        if before is not None and not (follows and before.offset + before.numel == piece.offset):
            found.append(position)
        position, before = position + piece.numel, piece
    return found


class Place(NamedTuple):
    """Elements ``[low, stop)`` of a parameter, which begin at ``position`` of a flat tensor."""

    low: int
    stop: int
    position: int


class Places:
    """Places of one parameter's parts in a flat tensor, ordered by their offsets in it.

    Attributes:
        low, stop: range of the parameter's elements from the first to the last with a place.
        numel: number of elements with a place.
    """

    def __init__(self, places: Iterable[Place]) -> None:
        self.every = sorted(places)
        self._lows = [place.low for place in self.every]
        self._longest = max(place.stop - place.low for place in self.every)
        self.low, self.stop = self.every[0].low, max(place.stop for place in self.every)
        self.numel = sum(place.stop - place.low for place in self.every)

    def within(self, low: int, stop: int) -> Iterator[Place]:
        """Yield the parts within ``[low, stop)`` of the parameter, without walking the rest."""
        for place in self.every[bisect_left(self._lows, low - self._longest) :]:
            if place.low >= stop:
                return
            first, last = max(low, place.low), min(stop, place.stop)
            if first < last:
                yield Place(first, last, place.position + first - place.low)


def places_of(pieces: Iterable[Piece]) -> dict[str, Places]:
    """Return the places of ``pieces`` in their flat tensor, by name; without padding."""
    found: dict[str, list[Place]] = {}
    position = 0
    for name, offset, numel in pieces:
        if name and numel:
            found.setdefault(name, []).append(Place(offset, offset + numel, position))
        position += numel
    return {name: Places(places) for name, places in found.items()}


@dataclass
class ResidualStretch:
    """One flat residual and the pieces that it covers, in order."""

    pieces: tuple[Piece, ...]
    flat: Residual

    @cached_property
    def places(self) -> dict[str, Places]:
        """Return the places of the parameters in ``flat``, by name."""
        return places_of(self.pieces)

    def saved(self) -> Iterator[tuple[str, tuple[int, Any]]]:
        """Yield name, offset and values for a checkpoint, adjacent fp32 slices joined."""
        for name, places in self.places.items():
            joined: list[list[Place]] = []
            for place in places.every:
                follows = bool(joined) and place.low == joined[-1][-1].stop
                if follows and isinstance(self.flat, Tensor):
                    joined[-1].append(place)
                else:
                    joined.append([place])
            for run in joined:
                parts = [self.flat[at : at + stop - low] for low, stop, at in run]
                whole = torch.cat(list(map(as_fp32, parts))) if len(parts) > 1 else parts[0]
                yield name, (run[0].low, for_checkpoint(whole))

    def left_to(self, others: Sequence[ResidualStretch], name: str) -> Iterator[Held]:
        """Move a parameter's residual to the first of ``others`` that cover it; yield the rest.

        The rest is copied, one slice for each range that none of ``others`` covers.
        """
        for other in others:
            move_residual(self, other, name)
        known = _joined(place for other in others for place in other.places[name].every)
        for low, stop, at in self.places[name].every:
            edges = [
                low,
                *(e for a, b in known for e in (max(a, low), min(b, stop)) if a < stop and b > low),
                stop,
            ]
            for first, last in zip(edges[::2], edges[1::2], strict=True):
                if first < last:
                    yield first, self.flat[at + first - low : at + last - low].clone()

    def parts(self) -> Iterator[tuple[Piece, Residual]]:
        position = 0
        for piece in self.pieces:
            yield piece, self.flat[position : position + piece.numel]
            position += piece.numel


def are_too_often(holders: Mapping[str, Sequence[ResidualStretch]]) -> bool:
    """Return whether slices hold parameters' values more than MOST_HELD times on average.

    ``holders``: for each parameter, the slices that hold any of it.
    """
    held = most = 0
    for name, stretches in holders.items():
        found = [stretch.places[name] for stretch in stretches]
        held += sum(places.numel for places in found)
        most += max(places.stop for places in found) - min(places.low for places in found)
    return held > MOST_HELD * most


def _joined(places: Iterable[Place]) -> list[tuple[int, int]]:
    """Return the elements covered by ``places`` of a parameter as ascending disjoint ranges."""
    found: list[tuple[int, int]] = []
    for low, stop, _ in sorted(places):
        if found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((low, stop))
    return found


def taken_out(stored: Iterable[Held], places: Places, flat: Residual | None) -> list[Held]:
    """Add the values of ``stored`` at a parameter's ``places`` to ``flat``; return the rest.

    ``flat`` None: drop these values instead of adding them.
    """
    left: list[Held] = []
    for offset, source in stored:
        stop = offset + source.numel()
        taken: list[tuple[int, int]] = []
        done = offset
        for low, high, position in places.within(offset, stop):
            first = max(low, done)  # add each value once even if places overlap
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


def move_residual(source: ResidualStretch, taker: ResidualStretch, name: str) -> None:
    """Add a parameter's residual in ``source`` to the one in ``taker``; zero it in ``source``."""
    for place in taker.places[name].every:
        for low, stop, position in source.places[name].within(place.low, place.stop):
            overlap = source.flat[position : position + stop - low]
            at = place.position + low - place.low
            part = taker.flat[at : at + stop - low]
            part.add_(as_fp32(overlap).to(part.device))
            overlap.zero_()
