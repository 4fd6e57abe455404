"""Look up the seconds of a cluster's native collectives, by operation, size and group.

Sizes that were not measured are interpolated linearly; groups that were not measured follow the
ring model of ``rings``, corrected by the groups that were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridcomp.errors import HybridcompError
from hybridcomp.tools.plan.machines import rings
from hybridcomp.tools.plan.machines.estimates import NOTHING, Curve, Estimate, curves
from hybridcomp.tools.plan.machines.overheads import closest
from hybridcomp.tools.plan.machines.rows import Beside, Operation, Timing


class Links:
    """Seconds of native messages. ``ranks_per_node``: ranks of the largest node.

    ``uplinks``: sends between sites; the ``ranks_per_site`` ranks of a site share its link.
    """

    def __init__(
        self,
        rows: Sequence[Timing],
        ranks_per_node: int,
        uplinks: Sequence[Timing] = (),
        ranks_per_site: int = 1,
    ) -> None:
        self._ranks_per_node, self._ranks_per_site = ranks_per_node, ranks_per_site
        sends = [(row.nbytes, row.seconds) for row in uplinks]
        self._uplink = Curve.through(sends) if sends else None
        self._curves: dict[tuple[Any, ...], Curve] = curves(
            ((row.operation, row.ranks, row.nodes, row.beside), row.nbytes, row.seconds)
            for row in rows
        )
        self._returned: dict[int, Curve] = curves(
            (row.nodes, row.nbytes, row.returned)
            for row in rows
            if row.returned is not None and row.operation == "send" and row.beside == "alone"
        )

    def seconds(
        self, operation: Operation, nbytes: float, ranks: int, nodes: int,
        busy: bool = False, computing: bool = False, sites: int = 1,
    ) -> Estimate:  # fmt: skip
        """Return the seconds of one native collective of ``ranks`` ranks on ``nodes`` nodes.

        Args:
            busy: all other groups of this shape send at the same time.
            computing: all other groups send, and all ranks compute at the same time.
            sites: sites that the ranks span; over several, the slower of node links and uplinks
                sets the seconds.

        Raises HybridcompError where neither this collective nor a send over its links is known.
        """
        if ranks < 2 or not nbytes:
            return NOTHING
        found = self._between(operation, nbytes, ranks, nodes, busy, computing)
        if sites < 2 or self._uplink is None:
            return found
        others = busy or computing
        sharing = max(1.0, self._ranks_per_site * sites / ranks) if others else 1.0
        up = rings.ring(operation, nbytes, ranks, sites, None, self._uplink.at, sharing)
        return up if up.value > found.value else found

    def _between(
        self, operation: Operation, nbytes: float, ranks: int, nodes: int, busy: bool,
        computing: bool,
    ) -> Estimate:  # fmt: skip
        """Return the seconds over the links between nodes, or inside one node, without uplinks."""
        wanted: tuple[Beside, ...] = ("compute", "groups") if computing else ("groups",)
        for beside in wanted if busy or computing else ():
            curve = self._curves.get((operation, ranks, nodes, beside))
            if curve is not None:
                return curve.at(nbytes)
        curve = self._curves.get((operation, ranks, nodes, "alone"))
        sharing = 1.0  # groups of this shape that share the link of a node
        if nodes > 1 and (busy or computing):
            sharing = max(1.0, self._ranks_per_node * nodes / ranks)
        if curve is not None and sharing == 1.0:
            return curve.at(nbytes)
        found = self._ring(operation, nbytes, ranks, nodes, sharing)
        return found.times(self._correction(operation, nbytes, ranks, nodes))

    def returned(self, nbytes: float, nodes: int) -> float:
        """Return the share of a send's seconds after which its call returns; 1 if not timed.

        A small message is in the buffers of the sender's system long before it has arrived.
        """
        known = self._returned.get(min(nodes, 2))
        whole = self.seconds("send", nbytes, 2, nodes).value if known is not None else 0.0
        return min(1.0, known.at(nbytes).value / whole) if known is not None and whole else 1.0

    def _ring(
        self, operation: Operation, nbytes: float, ranks: int, nodes: int, sharing: float
    ) -> Estimate:
        sends = {
            span: None if curve is None else curve.at
            for span in (1, 2)
            for curve in [self._curves.get(("send", 2, span, "alone"))]
        }
        needed = 2 if nodes > 1 else 1
        if sends[needed] is None:
            where = "between" if nodes > 1 else "inside"
            raise HybridcompError(
                f"the cluster has no figure for messages {where} nodes (wanted: {operation} of "
                f"{ranks} ranks on {nodes} nodes): measure that many nodes, or describe them"
            )
        return rings.ring(operation, nbytes, ranks, nodes, sends[1], sends[2], sharing)

    def _correction(self, operation: Operation, nbytes: float, ranks: int, nodes: int) -> float:
        """Return measured time divided by the ring model's, for the most similar measured group."""
        known = {
            (key[1], key[2]): curve for key, curve in self._curves.items()
            if key[0] == operation and key[3] == "alone" and (key[2] > 1) == (nodes > 1)
        }  # fmt: skip
        if not known:
            return 1.0
        group = closest(known, ranks, nodes)
        ring = self._ring(operation, nbytes, *group, 1.0).value
        return known[group].at(nbytes).value / ring if ring else 1.0
