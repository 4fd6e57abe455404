"""What an encoded message costs beside coding and wire: the host's work for each message.

Messages of two sizes were timed from the call to the decoded result. The smaller one says how many
seconds come on top of its coding and its wire, the larger one what factor the two need: below 1
where segments overlap, above it where coding and wire disturb each other. Where they went through
the channels of their dimensions (``Carried``), what a channel does is in them; of those that a
channel left native, what it took longer than torch.distributed is all that it costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from hybridcomp.plan.machines.figures import Figure, median
from hybridcomp.plan.machines.rows import NATIVE, Carried, Encoded, Operation

NOTHING = Figure(0.0, 0.0, 0.0)
Kind = TypeVar("Kind", bound=Hashable)
Row = TypeVar("Row", Encoded, Carried)
#: ranks and nodes of a group
Size = tuple[int, int]
#: dimensions whose messages of an operation take the way of another one's
SAME_WAY: Mapping[tuple[str, Operation], str] = {("cp", "all_to_all"): "ep"}
#: dimension, operation, whether payloads have a fixed size, whether other groups send as well
Channel = tuple[str, Operation, bool, bool]


class Overhead(NamedTuple):
    """Seconds of the host for each message, and the factor of coding and wire."""

    host: Figure
    factor: float


class MessageCosts:
    """What messages cost beside coding and wire, by dimension where channels were timed.

    Args:
        encoded, carried: messages of collectives alone, and through channels.
        parts: seconds of coding and wire of one.
        fixed_size: of the payloads of a setting.
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
        self._native = left_native((row for row in carried if row.setting == NATIVE), channel)

    def of(
        self, operation: Operation, ranks: int, nodes: int, setting: str, dimension: str = "",
        busy: bool = False,
    ) -> Overhead:  # fmt: skip
        """Of an encoded message, by the group most like its own; arguments as ``Cluster.overhead``.

        Nothing where no such message was timed.
        """
        fixed = self._fixed_size(setting)
        kinds = [(operation, fixed), (operation, True)]
        found = [self._channels.get(key) for key in _channels(dimension, operation, fixed, busy)]
        known = next(filter(None, [*found, *map(self._collectives.get, kinds)]), None)
        return known[closest(known, ranks, nodes)] if known else Overhead(NOTHING, 1.0)

    def native(
        self, operation: Operation, ranks: int, nodes: int, dimension: str, busy: bool
    ) -> Figure:
        """Of a message that a channel leaves native; nothing where none was timed."""
        keys = _channels(dimension, operation, True, busy)
        known = next(filter(None, map(self._native.get, keys)), None)
        return known[closest(known, ranks, nodes)] if known else NOTHING


def _channels(dimension: str, operation: Operation, fixed: bool, busy: bool) -> list[Channel]:
    """Where to look for a message, the most similar ones first."""
    name = SAME_WAY.get((dimension, operation), dimension)
    return [
        (name, operation, size, others)
        for size in dict.fromkeys((fixed, True)) for others in (busy, not busy)
    ]  # fmt: skip


def overheads(
    rows: Iterable[Row], parts: Callable[[Row], float], kind: Callable[[Row], Kind]
) -> dict[Kind, dict[Size, Overhead]]:
    """By ``kind``, and by group.

    Args:
        parts: seconds of coding and wire of a message.
        kind: what messages have in common that cost alike: their operation, and whether payloads
            have a fixed size; others take an exchange of sizes.
    """
    return {
        key: {size: _overhead(own, parts) for size, own in sizes.items()}
        for key, sizes in _grouped(rows, kind).items()
    }


def left_native(
    rows: Iterable[Carried], kind: Callable[[Carried], Kind]
) -> dict[Kind, dict[Size, Figure]]:
    """Seconds of channels for messages that they leave native, by ``kind`` and by group.

    The least of messages of any length: a channel does the same for every one, and what differs
    more than that differs from turn to turn.
    """
    return {
        key: {size: min(map(_more, own)) for size, own in sizes.items()}
        for key, sizes in _grouped(rows, kind).items()
    }


def _grouped(
    rows: Iterable[Row], kind: Callable[[Row], Kind]
) -> dict[Kind, dict[Size, list[Row]]]:  # fmt: skip
    found: dict[Kind, dict[Size, list[Row]]] = {}
    for row in rows:
        found.setdefault(kind(row), {}).setdefault((row.ranks, row.nodes), []).append(row)
    return found


def _more(row: Carried) -> Figure:
    more = row.seconds.minus(row.direct)
    return more if more.value else NOTHING


def _overhead(rows: Sequence[Row], parts: Callable[[Row], float]) -> Overhead:
    """Of the lines ``seconds = host + factor * parts`` through two sizes of each setting."""
    hosts: list[Figure] = []
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
        if host < 0:  # all of it grows with the message
            host, factor = 0.0, large.seconds.value / more if more else 1.0
        below, above = (abs(small.seconds.value - end) for end in small.seconds[1:3])
        hosts.append(Figure(host, max(0.0, host - below), host + above))
        factors.append(factor)
    low, high = min(one.low for one in hosts), max(one.high for one in hosts)
    return Overhead(Figure(median([one.value for one in hosts]), low, high), median(factors))


def closest(known: Collection[Size], ranks: int, nodes: int) -> Size:
    """The group (ranks, nodes) of ``known`` most like another: first whether it crosses nodes."""

    def distance(group: Size) -> tuple[bool, float]:
        size = abs(math.log(group[0] / ranks)) + abs(math.log(group[1] / nodes))
        return (group[1] > 1) != (nodes > 1), size

    return min(sorted(known), key=distance)
