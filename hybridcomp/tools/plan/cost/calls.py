"""Describe a message as the engine calls it, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hybridcomp.tools.plan.machines.estimates import NOTHING, Estimate
from hybridcomp.tools.plan.machines.rows import Direction, Operation


@dataclass(frozen=True)
class Price:
    """Cost of one message, or of several together, on one rank.

    coding: seconds for which the device encodes and decodes, calls included. wire: seconds of the
    link between nodes. inside: seconds of the link inside a node, including the native messages of
    an encoded collective in levels; of a copy to or from the host: seconds of the bus and of the
    host's codec. nbytes: bytes that this rank sends to other ranks. native_nbytes: bytes that it
    would send natively. between_nbytes, between_native_nbytes: the part of each that goes to other
    nodes.
    """

    coding: Estimate = NOTHING
    wire: Estimate = NOTHING
    inside: Estimate = NOTHING
    nbytes: float = 0.0
    native_nbytes: float = 0.0
    between_nbytes: float = 0.0
    between_native_nbytes: float = 0.0

    def plus(self, other: Price) -> Price:
        """Return the sum of both prices."""
        return Price(
            self.coding.plus(other.coding), self.wire.plus(other.wire),
            self.inside.plus(other.inside), self.nbytes + other.nbytes,
            self.native_nbytes + other.native_nbytes,
            self.between_nbytes + other.between_nbytes,
            self.between_native_nbytes + other.between_native_nbytes,
        )  # fmt: skip

    def times(self, count: float) -> Price:
        """Return the price of ``count`` such messages."""
        return Price(
            self.coding.times(count), self.wire.times(count), self.inside.times(count),
            count * self.nbytes, count * self.native_nbytes,
            count * self.between_nbytes, count * self.between_native_nbytes,
        )  # fmt: skip

    @property
    def seconds(self) -> Estimate:
        """Return the seconds of coding, wire and messages inside the node, in series."""
        return self.coding.plus(self.wire).plus(self.inside)


FREE = Price()


class Coded(NamedTuple):
    """Average number of codec calls per message; each codes this share of the message's values."""

    direction: Direction
    calls: float
    share: float


@dataclass(frozen=True)
class EngineCall:
    """A collective or a send as the engine calls it.

    operation: what the engine calls. encoded_as: the collective that replaces it if it is encoded
    (a bucket of which every rank keeps only its part is reduce-scattered). numel: number of values,
    counted as in ``rows``. ranks, nodes, sites: how many the group has or spans. levels: levels of
    ``hierarchy``; the call uses as many as its group spans. coded: codec calls, if they differ from
    those of the collective. kept: the call sends nothing, and decodes weights that this rank keeps.
    crosses_for: the upstream call that would natively send between nodes instead; None: this one.
    """

    operation: Operation
    numel: float
    ranks: int
    nodes: int
    encoded_as: Operation | None = None
    levels: int = 1
    coded: tuple[Coded, ...] | None = None
    sites: int = 1
    kept: bool = False
    crosses_for: EngineCall | None = None

    @property
    def inside(self) -> list[int]:
        """Return, by level, how many members sum natively before the sum is encoded."""
        if self.levels < 2 or self.nodes < 2 or self.ranks % self.nodes:
            return []
        widths = [self.ranks // self.nodes]
        if self.levels > 2 and self.sites > 1 and self.nodes % self.sites == 0:
            widths.append(self.nodes // self.sites)
        return [width for width in widths if width > 1]
