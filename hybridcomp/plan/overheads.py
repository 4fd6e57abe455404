"""What an encoded message costs beside coding and wire: the host's work for each message.

Messages of two sizes were timed from the call to the decoded result. The smaller one says how many
seconds come on top of its coding and its wire, the larger one what factor the two need: below 1
where segments overlap, above it where coding and wire disturb each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from hybridcomp.plan.figures import Figure, median, summary
from hybridcomp.plan.rows import Encoded, Operation


class Overhead(NamedTuple):
    """Seconds of the host for each message, and the factor of coding and wire."""

    host: Figure
    factor: float


def overheads(
    rows: Sequence[Encoded], parts: Callable[[Encoded], float]
) -> dict[Operation, dict[tuple[int, int], Overhead]]:
    """By operation and group (ranks, nodes). ``parts``: seconds of coding and wire of a message.

    Only messages that were timed alone count.
    """
    groups: dict[tuple[Operation, int, int], list[Encoded]] = {}
    for row in rows:
        if row.beside == "alone":
            groups.setdefault((row.operation, row.ranks, row.nodes), []).append(row)
    found: dict[Operation, dict[tuple[int, int], Overhead]] = {}
    for (operation, ranks, nodes), own in groups.items():
        found.setdefault(operation, {})[ranks, nodes] = _overhead(own, parts)
    return found


def _overhead(rows: Sequence[Encoded], parts: Callable[[Encoded], float]) -> Overhead:
    """Of the lines ``seconds = host + factor * parts`` through two sizes of each setting."""
    hosts, factors = [], []
    by_setting: dict[tuple[str, str], list[Encoded]] = {}
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
        hosts.append(host)
        factors.append(factor)
    return Overhead(summary(hosts), median(factors))


def closest(known: Collection[tuple[int, int]], ranks: int, nodes: int) -> tuple[int, int]:
    """The group (ranks, nodes) of ``known`` most like another: first whether it crosses nodes."""

    def distance(group: tuple[int, int]) -> tuple[bool, float]:
        size = abs(math.log(group[0] / ranks)) + abs(math.log(group[1] / nodes))
        return (group[1] > 1) != (nodes > 1), size

    return min(sorted(known), key=distance)
