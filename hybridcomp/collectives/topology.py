"""Keep the nodes of all ranks, and make the process groups of reductions in two levels or more.

All ranks of the job make all subgroups once, at start-up, in the same order, since ``new_group`` is
a collective over the whole job. Engines of a process that reduce over the same ranks share
subgroups. torch.distributed and the engines own the subgroups; this module holds weak references,
so that threads and sockets of a subgroup end with ``destroy_process_group`` or ``let_go``.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch.distributed as dist

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import Group, Levels
from hybridcomp.collectives.hierarchical.discovery import Hierarchy, placed
from hybridcomp.collectives.hierarchical.units import Arrangement, arrange
from hybridcomp.job import peer_liveness
from hybridcomp.job.agreement import tell

Ranks = tuple[int, ...]
#: numbers of levels in words, for messages
COUNTS = {2: "two", 3: "three", 4: "four"}

_Reference = Callable[[], dist.ProcessGroup | None]
#: subgroups of this process's default group, None if this rank is not a member
_made: dict[Ranks, _Reference | None] = {}
_made_in: list[_Reference] = [lambda: None]  # the default group of ``_made``


class Nodes:
    """Nodes of all ranks, units of several nodes, and the levels of groups across them."""

    def __init__(
        self,
        of_rank: Sequence[int],
        source: str,
        *above: Sequence[int],
        codecs: Sequence[Codec | None] = (),
    ) -> None:
        """Take ``of_rank``, the node of every global rank, and ``source``, where it comes from.

        ``above``: for each level above nodes, such as switches and sites, the unit of every global
        rank; a unit consists of whole units of the level below. ``codecs``: codec for the sums of
        each level, the innermost first; native where it is None or missing.
        """
        self.codecs = tuple(codecs)
        self.of_rank = tuple(of_rank)
        self.units = (self.of_rank, *map(tuple, above))
        self.source = source
        self._levels: dict[Ranks, Levels] = {}
        self.uses: set[Ranks] = set()  # subgroups of this rank
        self._rows: dict[Ranks, list[Ranks]] = {}
        self._deep = False
        _users.add(self)

    @property
    def layout(self) -> list[Any] | None:
        """Return the node of every rank, which decides how residuals are split over ranks.

        With units above nodes it is a list per level; None if no group of the job has two levels.
        """
        if not self._deep:
            return None
        return list(self.of_rank) if len(self.units) == 1 else [list(one) for one in self.units]

    def group(self, group: dist.ProcessGroup | None, *, two_levels: bool) -> Group:
        """Return a group with its remote ranks; with ``two_levels`` also its prepared levels.

        Remote ranks are those in other units of the largest kind that the group spans.
        """
        ranks, me = ranks_of(group), dist.get_rank()
        remote: frozenset[int] = frozenset()
        for units in self.units:
            far = [units[rank] != units[me] for rank in ranks]
            remote = frozenset(i for i, is_far in enumerate(far) if is_far) or remote
        return Group.of(group, remote, self._levels.get(ranks) if two_levels else None)

    def rows(self, group: Ranks) -> list[Ranks]:
        """Return the sets of ranks that sum before they encode: largest units, or single ranks.

        In one level they are single ranks. ``group``: the global ranks of any group of the job; the
        same on all ranks.
        """
        return self._rows.get(group) or [(rank,) for rank in group]

    def prepare(self, groups: Iterable[Ranks]) -> list[str]:
        """Make the subgroups of all groups of the job that have levels; a collective.

        ``groups``: the groups of this rank. Returns sentences for the user about the groups that
        span nodes, the same on all ranks.
        """
        # the first rank of a group announces it to all ranks
        own = {ranks for ranks in groups if ranks[0] == dist.get_rank()}
        said = tell({"groups": sorted(own), "alive": _alive()}, what="data-parallel groups")
        if not all(statement["alive"] for statement in said):
            # cleared on all ranks, so that all make the same groups in the same order
            _made.clear()
        every = sorted({tuple(ranks) for statement in said for ranks in statement["groups"]})
        count = len(set(self.of_rank))
        notes: dict[str, None] = {}
        used: set[int] = set()
        for ranks in every:
            found = arrange([[units[rank] for rank in ranks] for units in self.units])
            if isinstance(found, str):
                notes[found] = None
            elif found is not None:
                self._deep = True
                self._rows[ranks] = [_of(ranks, row) for row in found.grid]
                self._make(ranks, found)
                used.update(found.levels)
                levels = COUNTS.get(len(found.stages) + 1, f"{len(found.stages) + 1}")
                way = _way(found, self._codecs(found), nodes=len(self.units) == 1)
                notes[f"{levels} levels over {count} nodes (by {self.source}): {way}"] = None
                if found.note:
                    notes[found.note] = None
        if not notes and count == 1 and len(self.of_rank) > 1:
            notes[
                f"all ranks share one node (by {self.source}): nothing crosses a link between "
                "nodes, so there is little to gain here; compressed between all ranks"
            ] = None
        for level, codec in enumerate(self.codecs):
            if codec is not None and level not in used:
                why = "no group spans several units of its level in a regular grid"
                notes[f"{codec.spec} in level {level + 1} of hierarchy does nothing: {why}"] = None
        return list(notes)

    def _codecs(self, found: Arrangement) -> tuple[Codec | None, ...]:
        """Return the codec of each stage; a stage of several levels is native."""
        known = dict(enumerate(self.codecs))
        return tuple(known.get(level) for level in found.levels)

    def _make(self, ranks: Ranks, found: Arrangement) -> None:
        """Make all subgroups of the group ``ranks``, on every rank of the job in one order."""
        near = [[_of(ranks, row) for row in stage] for stage in found.stages]
        whole = [tuple(sorted(_of(ranks, row))) for row in found.grid]
        columns = [_of(ranks, column) for column in zip(*found.grid, strict=True)]
        if len(near) > 1:
            near.append(whole)
        made = {row: _group(row) for row in chain(*near, columns)}
        if dist.get_rank() not in ranks:
            return
        me = ranks.index(dist.get_rank())
        node = next(index for index, row in enumerate(found.grid) if me in row)
        local = found.grid[node].index(me)
        mine = [next(row for row in stage if dist.get_rank() in row) for stage in near]
        own = [made[row] for row in (*mine, columns[local])]
        assert None not in own  # None would be the default group
        *stages, far = own
        others = frozenset(range(len(found.grid))) - {node}
        self._levels[ranks] = Levels(
            found.grid, node, local, Group.of(stages[-1]), Group.of(far, others),
            tuple(map(Group.of, stages[:-1])), self._codecs(found),
        )  # fmt: skip
        self.uses |= {*mine, columns[local]}


def _of(ranks: Ranks, members: Iterable[int]) -> Ranks:
    """Return the global ranks of the group ranks ``members`` of ``ranks``."""
    return tuple(ranks[index] for index in members)


def _way(found: Arrangement, codecs: Sequence[Codec | None], *, nodes: bool) -> str:
    """Describe native and encoded levels; ``nodes``: there are no units above nodes."""
    units, width = len(found.grid), len(found.grid[0])
    if nodes:
        return f"native inside a node, encoded between {units} nodes of {width} ranks"
    ways = ["native" if codec is None else codec.spec for codec in codecs]
    inner = ", then ".join(
        f"among {ranks}" if way == before else f"{way} among {ranks}"
        for ranks, way, before in zip(found.widths, ways, ["", *ways], strict=False)
    )
    lossy = sum(1 for codec in codecs if codec is not None and not codec.lossless)
    times = "quantized twice at most"
    if lossy:
        times = f"quantized {2 + lossy} times at most, twice of these between the units"
    return f"{inner} ranks, encoded between {units} units of {width} ranks, {times}"


def ranks_of(group: dist.ProcessGroup | None) -> Ranks:
    """Return the global ranks of ``group``, by group rank."""
    return tuple(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))


def discover(hierarchy: Hierarchy, codecs: Sequence[Codec | None] = ()) -> Nodes:
    """Find the nodes of this job and the units above them; a collective with ``auto``.

    ``codecs``: codecs for the sums of each level.

    Raises ConfigError if a number does not divide the count of units one level below, or if a unit
    is unknown.
    """
    found = placed(hierarchy)
    nodes, *above = found.units
    return Nodes(nodes, found.source, *above, codecs=codecs)


def machines(device: str) -> list[tuple[int, str]]:
    """Gather node and device of every rank; a collective through the rendezvous store.

    ``device``: name of this rank's device.
    """
    nodes = discover("auto")
    said = tell({"device": device}, what="device")
    return [(node, str(one["device"])) for node, one in zip(nodes.of_rank, said, strict=True)]


def _alive() -> bool:
    """Return whether the subgroups made before still exist: any code may destroy groups."""
    world = dist.group.WORLD
    if _made_in[0]() is not world:  # torch.distributed was restarted
        _made_in[0] = weakref.ref(world)
        return not _made
    return all(_living(ranks) is not None for ranks, group in _made.items() if group is not None)


def _living(ranks: Ranks) -> dist.ProcessGroup | None:
    """Return the subgroup of ``ranks``; None if it was destroyed or this rank is no member."""
    reference = _made[ranks]
    group = None if reference is None else reference()
    try:
        return group if group is not None and ranks_of(group) == ranks else None
    except (KeyError, ValueError, RuntimeError):  # torch's errors for a destroyed one
        return None


def _group(ranks: Ranks) -> dist.ProcessGroup | None:
    if ranks in _made:
        return _living(ranks)
    group = dist.new_group(list(ranks), timeout=peer_liveness.time_limit())
    _made[ranks] = weakref.ref(group) if dist.get_rank() in ranks else None
    return group if dist.get_rank() in ranks else None


def let_go() -> None:
    """Destroy the subgroups that no engine of this process uses, with their threads and sockets.

    The next ``prepare`` makes them again, on all ranks. Subgroups of living engines stay.
    """
    if not _made or not dist.is_initialized() or _made_in[0]() is not dist.group.WORLD:
        return
    gc.collect()  # frees deleted engines, which reference cycles keep alive
    used = {ranks for nodes in _users for ranks in nodes.uses}
    for ranks in _made.keys() - used:
        if (group := _living(ranks)) is not None:
            dist.destroy_process_group(group)


#: the ``Nodes`` of living engines, held weakly; each lists the subgroups that it uses
_users: weakref.WeakSet[Nodes] = weakref.WeakSet()
