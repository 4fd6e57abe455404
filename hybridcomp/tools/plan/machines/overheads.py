"""Estimate the overhead of an encoded message beside coding and wire: the host's work for it.

Messages of two sizes were timed from the call to the decoded result. The smaller one gives the
seconds on top of its coding and its wire, the larger one a factor on both: below 1 where segments
overlap, above 1 where coding and wire slow each other down. Timings through the channels of the
dimensions (``Carried``) include the channel's work; for messages that a channel left native, the
overhead is the time beyond that of torch.distributed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple, TypeVar

from hybridcomp.tools.plan.machines.estimates import NOTHING, Estimate
from hybridcomp.tools.plan.machines.rows import NATIVE, Carried, Encoded, Operation

Kind = TypeVar("Kind", bound=Hashable)
Row = TypeVar("Row", Encoded, Carried)
#: ranks and nodes of a group
Size = tuple[int, int]
#: (dimension, operation) -> dimension whose messages go through the same code
SAME_WAY: Mapping[tuple[str, Operation], str] = {("cp", "all_to_all"): "ep"}
#: dimension, operation, fixed size of payloads or not, other groups sending as well or not
Channel = tuple[str, Operation, bool, bool]


class Overhead(NamedTuple):
    """Host seconds of each message, and the factor on seconds of coding and wire."""

    host: Estimate
    factor: float


class MessageCosts:
    """Overheads of messages beside coding and wire, by dimension where channels were timed.

    Args:
        encoded: timed collectives without a channel. carried: timed messages through channels.
        parts: returns the seconds of coding and wire of a message.
        fixed_size: returns whether payloads of a setting have a fixed size.
    """

    def __init__(
        self, encoded: Sequence[Encoded], carried: Sequence[Carried],
        parts: Callable[[Encoded | Carried], float], fixed_size: Callable[[str], bool],
    ) -> None:  # fmt: skip
        self._fixed_size = fixed_size

        def channel(row: Carried) -> Channel:
            others = row.beside != "alone"
            return row.dimension, row.operation, fixed_size(row.setting), others

        self._collectives = overheads(
            (row for row in encoded if row.beside == "alone"), parts,
            lambda row: (row.operation, fixed_size(row.setting)),
        )  # fmt: skip
        self._channels = overheads(
            (row for row in carried if row.setting != NATIVE), parts, channel
        )
        # a channel does the same work for messages of any length: larger differences are noise
        self._native = {
            key: {size: min(map(_more, own)) for size, own in sizes.items()}
            for key, sizes in _grouped(
                (row for row in carried if row.setting == NATIVE), channel
            ).items()
        }

    def of(
        self, operation: Operation, ranks: int, nodes: int, setting: str, dimension: str = "",
        busy: bool = False,
    ) -> Overhead:  # fmt: skip
        """Return an encoded message's overhead, of the most similar group timed.

        Arguments as ``Cluster.overhead``. It is zero where no such message was timed.
        """
        fixed = self._fixed_size(setting)
        kinds = [(operation, fixed), (operation, True)]
        found = [self._channels.get(key) for key in _channels(dimension, operation, fixed, busy)]
        known = next(filter(None, [*found, *map(self._collectives.get, kinds)]), None)
        return known[closest(known, ranks, nodes)] if known else Overhead(NOTHING, 1.0)

    def native(
        self, operation: Operation, ranks: int, nodes: int, dimension: str, busy: bool
    ) -> Estimate:
        """Return the seconds a channel adds to a message it leaves native; 0 if none was timed."""
        keys = _channels(dimension, operation, True, busy)
        known = next(filter(None, map(self._native.get, keys)), None)
        return known[closest(known, ranks, nodes)] if known else NOTHING


def _channels(dimension: str, operation: Operation, fixed: bool, busy: bool) -> list[Channel]:
    """Return the keys to look up for a message, the most similar ones first."""
    name = SAME_WAY.get((dimension, operation), dimension)
    return [
        (name, operation, size, others)
        for size in dict.fromkeys((fixed, True)) for others in (busy, not busy)
    ]  # fmt: skip


def overheads(
    rows: Iterable[Row], parts: Callable[[Row], float], kind: Callable[[Row], Kind]
) -> dict[Kind, dict[Size, Overhead]]:
    """Fit the overheads of ``rows`` by ``kind`` and by group.

    Args:
        parts: returns the seconds of coding and wire of a message.
        kind: returns the key of messages that are fitted together: their operation, and whether
            payloads have a fixed size (if not, the ranks also exchange the sizes).
    """
    return {
        key: {size: _overhead(own, parts) for size, own in sizes.items()}
        for key, sizes in _grouped(rows, kind).items()
    }


def _grouped(
    rows: Iterable[Row], kind: Callable[[Row], Kind]
) -> dict[Kind, dict[Size, list[Row]]]:  # fmt: skip
    found: dict[Kind, dict[Size, list[Row]]] = {}
    for row in rows:
        found.setdefault(kind(row), {}).setdefault((row.ranks, row.nodes), []).append(row)
    return found


def _more(row: Carried) -> Estimate:
    """Return the seconds that a channel adds to a message that it leaves native."""
    more = row.seconds.minus(row.direct)
    return more if more.value else NOTHING


def _overhead(rows: Sequence[Row], parts: Callable[[Row], float]) -> Overhead:
    """Fit ``seconds = host + factor * parts`` to two sizes of each setting; return the medians.

    With one size the factor is 1: short messages often cost less per byte than long ones.
    """
    hosts: list[Estimate] = []
    factors: list[float] = []
    by_setting: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_setting.setdefault((row.setting, row.dtype), []).append(row)
    for own in by_setting.values():
        small, large = (pick(own, key=lambda row: row.numel) for pick in (min, max))
        known, more = parts(small), parts(large)
        rise = large.seconds.value - small.seconds.value
        factor = rise / (more - known) if more > known and rise > 0 else 1.0
        host = small.seconds.value - factor * known
        if host < 0:  # no constant: all seconds grow with the message
            host, factor = 0.0, large.seconds.value / more if more > known else 1.0
        below, above = (abs(small.seconds.value - end) for end in small.seconds[1:3])
        hosts.append(Estimate(host, max(0.0, host - below), host + above))
        factors.append(factor)
    low, high = min(one.low for one in hosts), max(one.high for one in hosts)
    return Overhead(Estimate(median(one.value for one in hosts), low, high), median(factors))


def closest(known: Collection[Size], ranks: int, nodes: int) -> Size:
    """Return the most similar (ranks, nodes) of ``known``; crossing nodes or not counts first."""

    def distance(group: Size) -> tuple[bool, float]:
        size = abs(math.log(group[0] / ranks)) + abs(math.log(group[1] / nodes))
        return (group[1] > 1) != (nodes > 1), size

    return min(sorted(known), key=distance)
