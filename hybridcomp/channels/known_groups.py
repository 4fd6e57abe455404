"""Map the process groups that the messages of one dimension use to their ranks and nodes."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hybridcomp.channels.engine_state import EngineState
from hybridcomp.collectives import Group
from hybridcomp.collectives.topology import Nodes
from hybridcomp.dimensions import ROWS, Dimension

#: torch's process group, and the nodes that were known when its ``Group`` was created
GroupKey = tuple[ProcessGroup | None, Nodes | None]


class KnownGroups(dict[GroupKey, Group]):
    """Map each process group of one dimension to its ``Group``, created on first use.

    Creating one also drops groups that were destroyed or that were made for outdated nodes.
    """

    def __init__(self, dimension: Dimension, state: EngineState) -> None:
        super().__init__()
        self._dimension, self._state = dimension, state

    def __missing__(self, key: GroupKey) -> Group:
        """Make and keep the ``Group`` of a process group: rank, size, nodes, levels."""
        group, nodes = key
        for gone in [old for old in self if old[1] is not nodes or not exists(old[0])]:
            del self[gone]
        if nodes is None:
            found = Group.of(group)
        else:
            # residuals of low-rank sums cover whole messages, also when a flush sends them
            deep = ROWS[self._dimension].two_levels
            deep = deep and self._dimension not in self._state.policy.low_rank
            found = nodes.group(group, two_levels=deep)
        self[key] = found
        return found


def exists(group: ProcessGroup | None) -> bool:
    """Return whether ``group`` exists; keeping a destroyed one would keep its threads alive."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):  # torch's errors for a destroyed group
        return False
    return True
