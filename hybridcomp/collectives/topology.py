"""Find the ranks of each node, and make the process groups of a two-level reduction.

DeepSpeed's launcher sets ``CROSS_RANK`` on every rank (its ``launch.py``), torchrun ``GROUP_RANK``
(torch.distributed.elastic): the number of the node. Unless all ranks have one of these, ranks
with the same host name and boot id share a node, as in NCCL (its ``getHostHash``).

Subgroups are made once, at start-up, by all ranks of the job in the same order: ``new_group`` is a
collective over the whole job. All engines of a process that reduce over the same ranks share them.
torch.distributed and the engines hold them; this module refers to them weakly, so that their
threads and sockets end with ``destroy_process_group``, or with ``let_go``.
"""

from __future__ import annotations

import gc
import os
import socket
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from hybridcomp.collectives import Group, Levels
from hybridcomp.errors import ConfigError
from hybridcomp.job import peer_liveness
from hybridcomp.job.agreement import tell

#: ``auto``, ``none``, or the number of consecutive ranks that share a node
Hierarchy = Literal["auto", "none"] | int
Ranks = tuple[int, ...]
#: environment variables with the number of the node, by launcher
VARIABLES = ("CROSS_RANK", "GROUP_RANK")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_Reference = Callable[[], dist.ProcessGroup | None]
#: subgroups of this process's default group, None where this rank is no member
_made: dict[Ranks, _Reference | None] = {}
_made_in: list[_Reference] = [lambda: None]  # the default group of ``_made``


class Nodes:
    """Nodes of all ranks, and the two levels of the groups that span nodes."""

    def __init__(self, of_rank: Sequence[int], source: str) -> None:
        """``of_rank``: a number for the node of every global rank; ``source``: its origin."""
        self.of_rank = tuple(of_rank)
        self.source = source
        self._levels: dict[Ranks, Levels] = {}
        self.uses: set[Ranks] = set()  # subgroups of this rank
        self._rows: dict[Ranks, list[Ranks]] = {}
        self._deep = False
        _users.add(self)

    @property
    def deep(self) -> bool:
        """Return whether any group of the job has two levels."""
        return self._deep

    def group(self, group: dist.ProcessGroup | None, *, two_levels: bool) -> Group:
        """Return a group with its remote ranks; with ``two_levels`` also its prepared levels."""
        ranks, me = ranks_of(group), dist.get_rank()
        far = [self.of_rank[rank] != self.of_rank[me] for rank in ranks]
        remote = frozenset(index for index, is_far in enumerate(far) if is_far)
        return Group.of(group, remote, self._levels.get(ranks) if two_levels else None)

    def rows(self, group: Ranks) -> list[Ranks]:
        """Return the ranks that encode a sum together: each node in two levels, else each alone.

        ``group``: the global ranks of any group of the job; the same on all ranks.
        """
        return self._rows.get(group) or [(rank,) for rank in group]

    def prepare(self, groups: Iterable[Ranks]) -> list[str]:
        """Make the subgroups of all groups of the job that have two levels; a collective.

        ``groups``: the groups of this rank. Returns sentences for the user about the groups that
        span nodes, the same on all ranks.
        """
        own = {ranks for ranks in groups if ranks[0] == dist.get_rank()}  # its first rank states it
        said = tell({"groups": sorted(own), "alive": _alive()}, what="data-parallel groups")
        if not all(statement["alive"] for statement in said):
            _made.clear()  # on all ranks: they make the same groups in the same order
        every = sorted({tuple(ranks) for statement in said for ranks in statement["groups"]})
        count = len(set(self.of_rank))
        notes: dict[str, None] = {}
        for ranks in every:
            grid = grid_of([self.of_rank[rank] for rank in ranks])
            if isinstance(grid, str):
                notes[grid] = None
            elif grid is not None:
                self._deep = True
                self._rows[ranks] = [tuple(ranks[index] for index in row) for row in grid]
                self._make(ranks, grid)
                notes[
                    f"two levels over {count} nodes (by {self.source}): native inside a node, "
                    f"encoded between {len(grid)} nodes of {len(grid[0])} ranks"
                ] = None
        if not notes and count == 1 and len(self.of_rank) > 1:
            notes[
                f"all ranks share one node (by {self.source}), so nothing crosses nodes: "
                "compressed between all ranks"
            ] = None
        return list(notes)

    def _make(self, ranks: Ranks, grid: tuple[Ranks, ...]) -> None:
        rows = [tuple(ranks[index] for index in row) for row in grid]
        columns = [tuple(ranks[index] for index in column) for column in zip(*grid, strict=True)]
        inner, outer = [_group(row) for row in rows], [_group(column) for column in columns]
        if dist.get_rank() in ranks:
            me = ranks.index(dist.get_rank())
            node = next(index for index, row in enumerate(grid) if me in row)
            local = grid[node].index(me)
            others = frozenset(range(len(grid))) - {node}
            near, far = inner[node], outer[local]
            assert near is not None and far is not None  # None would be the default group
            self._levels[ranks] = Levels(grid, node, local, Group.of(near), Group.of(far, others))
            self.uses |= {rows[node], columns[local]}


def ranks_of(group: dist.ProcessGroup | None) -> Ranks:
    """Return the global ranks of ``group``, by group rank."""
    return tuple(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))


def grid_of(nodes: Sequence[int]) -> tuple[Ranks, ...] | str | None:
    """Group ranks by node, from the node of every group rank.

    None where there are no two levels: one node, or one rank on each. A sentence where the group
    spans nodes, but is no grid of nodes times local ranks.
    """
    rows: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        rows.setdefault(node, []).append(rank)
    counts = {len(row) for row in rows.values()}
    if len(rows) < 2 or counts == {1}:
        return None
    if len(counts) > 1:
        return (
            f"a group has {' and '.join(map(str, sorted(counts)))} ranks on its nodes: two levels "
            "need equally many, so every rank sends encoded messages to every other"
        )
    grid = tuple(tuple(row) for row in rows.values())
    if any(list(column) != sorted(column) for column in zip(*grid, strict=True)):
        return (
            "the ranks of a group are dealt to its nodes in no regular order, so every rank sends "
            "encoded messages to every other"
        )
    return grid


def discover(hierarchy: Hierarchy) -> Nodes:
    """Find the nodes of this job; a collective through the rendezvous store with ``auto``.

    Raises ConfigError when the integer ``hierarchy`` does not divide the number of ranks.
    """
    world_size = dist.get_world_size()
    if isinstance(hierarchy, int):
        if world_size % hierarchy:
            raise ConfigError(
                "compression.hierarchy",
                hierarchy,
                f"the job has {world_size} ranks, no multiple of it; write the number of ranks "
                'that share a node, or "auto"',
            )
        return Nodes([rank // hierarchy for rank in range(world_size)], "compression.hierarchy")
    said = tell(
        {**{name: os.environ.get(name) for name in VARIABLES}, "host": _host()}, what="node"
    )
    for name in (*VARIABLES, "host"):
        values = [statement[name] for statement in said]
        if None not in values:
            numbers = {value: index for index, value in enumerate(dict.fromkeys(values))}
            return Nodes([numbers[value] for value in values], name)
    raise AssertionError("every rank has a host")


def machines(device: str) -> list[tuple[int, str]]:
    """Gather node and device of every rank; a collective through the rendezvous store.

    ``device``: name of this rank's device.
    """
    nodes = discover("auto")
    said = tell({"device": device}, what="device")
    return [(node, str(one["device"])) for node, one in zip(nodes.of_rank, said, strict=True)]


def _host() -> str:
    boot = BOOT_ID.read_text().strip() if BOOT_ID.is_file() else ""
    return f"{socket.gethostname()} {boot}"


def _alive() -> bool:
    """Return whether the subgroups made before still exist: any code may destroy groups."""
    world = dist.group.WORLD
    if _made_in[0]() is not world:  # torch.distributed was started again
        _made_in[0] = weakref.ref(world)
        return not _made
    return all(_living(ranks) is not None for ranks, group in _made.items() if group is not None)


def _living(ranks: Ranks) -> dist.ProcessGroup | None:
    """Return the subgroup of ``ranks``; None where it was destroyed, or this rank is no member."""
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

    The next ``prepare`` makes them again, on all ranks. Living engines keep theirs.
    """
    if not _made or not dist.is_initialized() or _made_in[0]() is not dist.group.WORLD:
        return
    gc.collect()  # engines hang in reference cycles: one that was deleted must not count
    used = {ranks for nodes in _users for ranks in nodes.uses}
    for ranks in _made.keys() - used:
        if (group := _living(ranks)) is not None:
            dist.destroy_process_group(group)


#: the ``Nodes`` of engines, which use subgroups, held weakly
_users: weakref.WeakSet[Nodes] = weakref.WeakSet()
