"""Arrange the ranks of a group by the units that contain them: nodes, switches, sites.

A group spans several largest units. The ranks of each such unit sum their values natively before
they encode one message: level by level, nearest ranks first. A rank has one digit per level, its
position among the ranks that sum together on that level. Its local index consists of these digits,
the innermost as the most significant, so that each level cuts the values into contiguous slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: group ranks
Members = tuple[int, ...]


@dataclass(frozen=True)
class Arrangement:
    """The ranks of a group in two levels or more.

    Attributes:
        grid: group ranks by largest unit, then by local index.
        stages: for each level inside the largest units, innermost first: the sets of group ranks
            that sum natively together, ascending.
        note: a remark for the user, or "".
        levels: for each of ``stages`` its level number, 0 for the innermost level; -1 for a stage
            that joins several levels.
    """

    grid: tuple[Members, ...]
    stages: tuple[tuple[Members, ...], ...]
    note: str = ""
    levels: tuple[int, ...] = (0,)

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the number of ranks that sum together on each level, the innermost first."""
        return tuple(len(stage[0]) for stage in self.stages)


def arrange(units: Sequence[Sequence[int]]) -> Arrangement | str | None:
    """Arrange a group; ``units``: per level, innermost first, the unit number of every group rank.

    Returns None if there are not two levels (a single unit, or one rank in each largest unit), or a
    sentence if the group spans units but is no grid of units times local ranks.
    """
    spanned = [level for level in units if len(set(level)) > 1]
    grid = grid_of(spanned[-1]) if spanned else None
    if grid is None or isinstance(grid, str):
        return grid
    parts = [_part(row, spanned[:-1]) for row in grid]
    first = parts[0]
    if first is not None and all(part and part.widths == first.widths for part in parts):
        orders = tuple(part.order for part in parts if part)
        stages = tuple(sum((part.stages[i] for part in parts if part), ())
                       for i in range(len(first.widths)))  # fmt: skip
        if all(list(column) == sorted(column) for column in zip(*orders, strict=True)):
            levels = [level for level, stage in enumerate(stages) if len(stage[0]) > 1]
            return Arrangement(
                orders, tuple(stages[level] for level in levels), levels=tuple(levels)
            )
    return Arrangement(
        grid,
        (grid,),
        "the units inside of a group's largest ones differ in their ranks, so the ranks of a "
        "largest one sum in one step",
        levels=(-1,),
    )


def grid_of(nodes: Sequence[int]) -> tuple[Members, ...] | str | None:
    """Group ranks by node, from the node of every group rank.

    Returns None if there are not two levels (a single node, or one rank on each), or a sentence if
    the group spans nodes but is no grid of nodes times local ranks.
    """
    rows = _by_unit(range(len(nodes)), nodes)
    counts = {len(row) for row in rows}
    if len(rows) < 2 or counts == {1}:
        return None
    if len(counts) > 1:
        return (
            f"a group has {' and '.join(map(str, sorted(counts)))} ranks on its nodes: two levels "
            "need equally many, so every rank sends encoded messages to every other"
        )
    if any(list(column) != sorted(column) for column in zip(*rows, strict=True)):
        return (
            "the ranks of a group are dealt to its nodes in no regular order, so every rank sends "
            "encoded messages to every other"
        )
    return tuple(rows)


@dataclass(frozen=True)
class _Part:
    """Ranks of one unit by local index; for each level its width and the ranks that sum there."""

    order: Members
    widths: tuple[int, ...]
    stages: tuple[tuple[Members, ...], ...]


def _part(row: Members, levels: Sequence[Sequence[int]]) -> _Part | None:
    """Arrange the ranks ``row`` of one unit, which consists of the smaller units of ``levels``.

    Returns None if the smaller units form no regular grid.
    """
    if not levels:
        return _Part(row, (len(row),), ((row,),))
    parts = [_part(inner, levels[:-1]) for inner in _by_unit(row, levels[-1])]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts) or any(part.widths != found[0].widths for part in found):
        return None
    columns = tuple(zip(*(part.order for part in found), strict=True))
    if any(list(column) != sorted(column) for column in columns):
        return None
    stages = tuple(sum(same, ()) for same in zip(*(part.stages for part in found), strict=True))
    order = tuple(rank for column in columns for rank in column)
    return _Part(order, (*found[0].widths, len(found)), (*stages, columns))


def _by_unit(ranks: Sequence[int], numbers: Sequence[int]) -> list[Members]:
    """Group ``ranks`` by unit, in the order in which units appear; ``numbers``: unit by rank."""
    rows: dict[int, list[int]] = {}
    for rank in ranks:
        rows.setdefault(numbers[rank], []).append(rank)
    return [tuple(row) for row in rows.values()]
