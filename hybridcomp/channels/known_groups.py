"""The process groups that the messages of one dimension go over, with their nodes."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hybridcomp.channels.engine_state import EngineState
from hybridcomp.collectives import Group
from hybridcomp.collectives.topology import Nodes
from hybridcomp.dimensions import ROWS, Dimension


class KnownGroups:
    """``Group`` of each process group of one dimension, made when it is met for the first time."""

    def __init__(self, dimension: Dimension, state: EngineState) -> None:
        self._dimension, self._state = dimension, state
        self._groups: dict[ProcessGroup | None, Group] = {}
        self._placed: Nodes | None = None  # the nodes that ``_groups`` know

    def of(self, group: ProcessGroup | None) -> Group:
        """Return the ``Group`` of a process group: rank, size, nodes, levels."""
        nodes = self._state.nodes
        if nodes is not self._placed:
            self._groups.clear()
            self._placed = nodes
        key = dist.group.WORLD if group is None else group
        found = self._groups.get(key)
        if found is None:
            for gone in [known for known in self._groups if not _exists(known)]:
                del self._groups[gone]
            if nodes is None:
                found = Group.of(group)
            else:
                # residuals of low-rank sums cover whole messages, also where a flush sends them
                deep = ROWS[self._dimension].two_levels
                deep = deep and self._dimension not in self._state.policy.low_rank
                found = nodes.group(group, two_levels=deep)
            self._groups[key] = found
        return found


def _exists(group: ProcessGroup | None) -> bool:
    """Return whether ``group`` still exists; a reference to a destroyed one keeps its threads."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):  # what torch raises for a destroyed one
        return False
    return True
