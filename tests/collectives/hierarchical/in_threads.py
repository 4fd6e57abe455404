"""Levels of any depth among ranks that are threads, arranged as ``topology`` arranges processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import Group, Levels
from hybridcomp.collectives.hierarchical.units import Arrangement, arrange
from tests.collectives.calls import group_of
from tests.stand_ins import thread_groups


def units_of(widths: Sequence[int], ranks: int) -> list[list[int]]:
    """Return units of consecutive ranks, by level, the innermost first."""
    found, width = [], 1
    for more in widths:
        width *= more
        found.append([rank // width for rank in range(ranks)])
    return found


def deep_groups(
    units: Sequence[Sequence[int]],
    codecs: Sequence[Codec | None] = (),
) -> tuple[Arrangement, Callable[[int], Levels], list[Any]]:
    """Return the arrangement, a factory of a rank's levels, and the boards of its groups."""
    found = arrange(units)
    assert isinstance(found, Arrangement)
    columns = tuple(zip(*found.grid, strict=True))
    whole = tuple(tuple(sorted(row)) for row in found.grid)
    steps = [*found.stages, whole] if len(found.stages) > 1 else [found.stages[0]]
    boards = {row: thread_groups.Board(len(row)) for step in (*steps, columns) for row in step}

    def group_with(step: Sequence[tuple[int, ...]], rank: int) -> Any:
        row = next(row for row in step if rank in row)
        return group_of(thread_groups.Member(boards[row], row.index(rank)))

    def levels(rank: int) -> Levels:
        node = next(index for index, row in enumerate(found.grid) if rank in row)
        *parts, inner = (group_with(step, rank) for step in steps)
        far = group_with(columns, rank)
        outer = Group(far.process_group, node, far.size, frozenset(range(far.size)) - {node})
        local, own = found.grid[node].index(rank), tuple(codecs)
        return Levels(found.grid, node, local, inner, outer, tuple(parts), own)

    return found, levels, list(boards.values())


def everywhere(
    units: Sequence[Sequence[int]],
    run: Callable[[Any, int], Any],
    codecs: Sequence[Codec | None] = (),
) -> list[Any]:
    """Return the result of ``run`` on each rank, with its levels of ``units`` and ``codecs``."""
    ranks = len(units[0])
    _, levels, boards = deep_groups(units, codecs)
    return thread_groups.run(ranks, lambda _, rank: run(levels(rank), rank), boards)
