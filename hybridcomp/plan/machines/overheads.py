"""What an encoded message costs beside coding and wire: the host's work for each message.

Messages of two sizes were timed from the call to the decoded result. The smaller one says how many
seconds come on top of its coding and its wire, the larger one what factor the two need: below 1
where segments overlap, above it where coding and wire disturb each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from hybridcomp.plan.machines.figures import Figure, median
from hybridcomp.plan.machines.rows import Encoded, Operation


class Overhead(NamedTuple):
    """Seconds of the host for each message, and the factor of coding and wire."""

    host: Figure
    factor: float


def overheads(
    rows: Sequence[Encoded],
    parts: Callable[[Encoded], float],
    fixed_size: Callable[[str], bool],
) -> dict[tuple[Operation, bool], dict[tuple[int, int], Overhead]]:
    """By operation, by whether payloads have a fixed size, and by group (ranks, nodes).

    Args:
        rows: only messages that were timed alone count.
        parts: seconds of coding and wire of a message.
        fixed_size: of the payloads of a setting; others take an exchange of sizes.
    """
    groups: dict[tuple[Operation, bool, int, int], list[Encoded]] = {}
    for row in rows:
        if row.beside == "alone":
            key = (row.operation, fixed_size(row.setting), row.ranks, row.nodes)
            groups.setdefault(key, []).append(row)
    found: dict[tuple[Operation, bool], dict[tuple[int, int], Overhead]] = {}
    for (operation, fixed, ranks, nodes), own in groups.items():
        found.setdefault((operation, fixed), {})[ranks, nodes] = _overhead(own, parts)
    return found


def _overhead(rows: Sequence[Encoded], parts: Callable[[Encoded], float]) -> Overhead:
    """Of the lines ``seconds = host + factor * parts`` through two sizes of each setting."""
    hosts: list[Figure] = []
    factors: list[float] = []
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
        below, above = (abs(small.seconds.value - end) for end in small.seconds[1:3])
        hosts.append(Figure(host, max(0.0, host - below), host + above))
        factors.append(factor)
    low, high = min(one.low for one in hosts), max(one.high for one in hosts)
    return Overhead(Figure(median([one.value for one in hosts]), low, high), median(factors))


def closest(known: Collection[tuple[int, int]], ranks: int, nodes: int) -> tuple[int, int]:
    """The group (ranks, nodes) of ``known`` most like another: first whether it crosses nodes."""

    def distance(group: tuple[int, int]) -> tuple[bool, float]:
        size = abs(math.log(group[0] / ranks)) + abs(math.log(group[1] / nodes))
        return (group[1] > 1) != (nodes > 1), size

    return min(sorted(known), key=distance)
