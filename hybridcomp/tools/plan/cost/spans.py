"""Find the nodes and sites that the groups of a layout span, and make the calls over them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridcomp.tools.plan.cost.calls import Coded, EngineCall
from hybridcomp.tools.plan.layout import Group, Layout
from hybridcomp.tools.plan.machines.cluster import Cluster
from hybridcomp.tools.plan.machines.rows import Operation


@dataclass(frozen=True, eq=False)
class GroupSpans:
    """Nodes and sites that the groups of layouts span on ``cluster``, each computed once."""

    cluster: Cluster
    #: (first rank, stride, size) of a group -> (nodes, sites)
    _known: dict[tuple[int, int, int], tuple[int, int]] = field(default_factory=dict, repr=False)

    def of(self, layout: Layout, group: Group, stage: int = 0) -> tuple[int, int]:
        """Return the numbers of nodes and of sites that a group of ``stage`` spans."""
        first = stage * layout.ranks_per_stage
        key = first, layout.stride(group), layout.size(group)
        if key not in self._known:
            members = layout.members(group, first)
            self._known[key] = self.cluster.nodes_of(members), self.cluster.sites_of(members)
        return self._known[key]

    def call(
        self, operation: Operation, numel: float, layout: Layout, group: Group, stage: int
    ) -> EngineCall:
        """Return a collective of ``numel`` values over a group of ``stage``."""
        nodes, sites = self.of(layout, group, stage)
        return EngineCall(operation, numel, layout.size(group), nodes, sites=sites)

    def send(
        self, numel: float, layout: Layout, group: Group, stage: int,
        coded: tuple[Coded, ...] | None = None,
    ) -> EngineCall:  # fmt: skip
        """Return a send from one rank of a group of ``stage`` to the next rank of the group."""
        nodes, sites = (min(2, count) for count in self.of(layout, group, stage))
        return EngineCall("send", numel, 2, nodes, coded=coded, sites=sites)
