"""A cluster as a planner sees it: ranks, links, codecs and kernels, each figure with its spread.

``hybridcomp measure`` writes one on the real machines, or somebody describes one by hand
(``cluster_file``). Sizes that were not measured are interpolated linearly; groups that were not
measured follow the ring model of ``rings``, corrected by the groups that were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hybridcomp.errors import HybridcompError
from hybridcomp.tools.plan.machines import rings
from hybridcomp.tools.plan.machines.codings import coded, coding_of
from hybridcomp.tools.plan.machines.estimates import NOTHING, Curve, Estimate, curves
from hybridcomp.tools.plan.machines.links import Links
from hybridcomp.tools.plan.machines.overheads import MessageCosts, Overhead
from hybridcomp.tools.plan.machines.rows import (
    STRICT,
    Carried,
    Coding,
    Copy,
    Count,
    Direction,
    Encoded,
    Kernel,
    Kind,
    LeftOut,
    MessageHost,
    Operation,
    Rank,
    Tier,
    Timing,
    TrainedSmall,
)
from hybridcomp.tools.plan.machines.speeds import dtypes_of, speeds_of


@dataclass(frozen=True)
class Cluster:
    """Ranks of a cluster with the seconds of their links, codecs, copies, kernels and trainings.

    encoded: timed collectives without a channel. channels: timed messages through a dimension's
    channel. left_out: messages of either kind that were not timed. host_codecs: codecs on the hosts
    of GPUs, on the cores that also serve copies; hosts without GPUs have them in ``codecs``.
    message: host seconds of an encoded message, in a description, which has no timed messages.
    made: versions and back end of the measurement. nodes_per_site: consecutive nodes that share a
    switch or a site (0: there are no sites). uplinks: sends between two sites. drives: files of a
    node's drive. host_nbytes: memory of a node's host (0: unknown, so no plan is refused for it).
    """

    __pydantic_config__ = STRICT

    ranks: tuple[Rank, ...]
    links: tuple[Timing, ...] = ()
    encoded: tuple[Encoded, ...] = ()
    codecs: tuple[Coding, ...] = ()
    copies: tuple[Copy, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    trainings: tuple[TrainedSmall, ...] = ()
    channels: tuple[Carried, ...] = ()
    host_codecs: tuple[Coding, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    by_hand: bool = False
    message: MessageHost | None = None
    made: Mapping[str, str] = field(default_factory=dict)
    nodes_per_site: Count = 0
    uplinks: tuple[Timing, ...] = ()
    drives: tuple[Copy, ...] = ()
    host_nbytes: Count = 0

    @property
    def world_size(self) -> int:
        """Number of ranks of the cluster."""
        return len(self.ranks)

    @cached_property
    def nodes(self) -> int:
        """Number of nodes of the cluster."""
        return len({rank.node for rank in self.ranks})

    @cached_property
    def ranks_per_node(self) -> int:
        """Number of ranks of the largest node."""
        of_node = [rank.node for rank in self.ranks]
        return max(map(of_node.count, set(of_node)))

    @cached_property
    def on_cpu(self) -> bool:
        """True where the devices are CPUs, whose memory is that of their host."""
        name, _, threads = self.ranks[0].device.lower().rpartition(",")
        return "cpu" in name + threads or "thread" in threads

    @cached_property
    def dtypes(self) -> frozenset[str]:
        """Dtypes in which the speed of every rank's matrix products is known."""
        return dtypes_of(self.ranks, self.kernels)

    @property
    def codes_on_host(self) -> bool:
        """True where the speed of encoding and decoding on hosts is known."""
        return self.on_cpu or bool(self.host_codecs)

    def nodes_of(self, ranks: Iterable[int]) -> int:
        """Return the number of nodes that a group of these ranks spans."""
        return len({self.ranks[rank].node for rank in ranks})

    def sites_of(self, ranks: Iterable[int]) -> int:
        """Return the number of sites that a group of these ranks spans; 1 without sites."""
        if not self.nodes_per_site:
            return 1
        return len({self.ranks[rank].node // self.nodes_per_site for rank in ranks})

    def seconds(
        self, operation: Operation, nbytes: float, ranks: int, nodes: int,
        busy: bool = False, computing: bool = False, sites: int = 1,
    ) -> Estimate:  # fmt: skip
        """Return the seconds of one native collective (``Links.seconds``)."""
        return self._links.seconds(operation, nbytes, ranks, nodes, busy, computing, sites)

    def returned(self, nbytes: float, nodes: int) -> float:
        """Return the share of a send's seconds until the call returns (``Links.returned``)."""
        return self._links.returned(nbytes, nodes)

    def coding(
        self, setting: str, dtype: str, numel: float, direction: Direction, on_host: bool = False
    ) -> Estimate:
        """Return the seconds in which a device codes ``numel`` values of ``dtype`` in one call.

        Args:
            setting: a codec's ``spec``, such as ``blockint(bits=4)``; where only other settings of
                the same codec were measured, the slowest of them stands for it.
            on_host: the device's host runs the codec, not the device.

        Raises HybridcompError where the codec was not measured at all.
        """
        if not numel:
            return NOTHING
        host = on_host and not self.on_cpu
        table = self._host_codings if host else self._codings
        known = coding_of(table, setting, dtype, direction)
        chosen = [curve for (_, beside), curve in known.items() if beside == "alone"]
        found = [curve.at(numel) for curve in chosen or known.values()]
        return max(found, key=lambda figure: figure.value)

    def encoded_parts(
        self, operation: Operation, setting: str, dtype: str, numel: float, nbytes: float,
        ranks: int, nodes: int, busy: bool = False,
    ) -> tuple[Estimate, Estimate]:  # fmt: skip
        """Return the coding seconds and the wire seconds of one encoded collective."""
        shape = rings.encoded_shape(operation, ranks)
        coding = Estimate.total(
            self.coding(setting, dtype, share * numel, direction)
            for direction, share in shape.coded
        )
        wire = Estimate.total(
            self.seconds(part, share * nbytes, ranks, nodes, busy) for part, share in shape.sent
        )
        return coding, wire

    def overhead(
        self, operation: Operation, ranks: int, nodes: int, setting: str = "",
        dimension: str = "", busy: bool = False,
    ) -> Overhead:  # fmt: skip
        """Return an encoded message's overhead on top of coding and wire, from the nearest group.

        Args:
            setting: the codec's; ranks also exchange payload sizes if its payloads vary in size.
            dimension: its channel sends the message; if not timed, a collective alone counts.
            busy: all other groups of this shape send at the same time.

        A described cluster returns ``message``; one without any such timing returns zero.
        """
        if self.message is not None:
            return Overhead(self.message.seconds(ranks), 1.0)
        return self._costs.of(operation, ranks, nodes, setting, dimension, busy)

    def channel_seconds(
        self, operation: Operation, ranks: int, nodes: int, dimension: str, busy: bool = False
    ) -> Estimate:
        """Return the seconds that a channel adds to a message that it leaves native."""
        return self._costs.native(operation, ranks, nodes, dimension, busy)

    def copy(self, direction: Tier, nbytes: float) -> Estimate:
        """Return seconds of a copy between device and host, or of a file on the drive.

        Raises HybridcompError if the cluster has no such row.
        """
        known = (*self.copies, *self.drives)
        rows = [(row.nbytes, row.seconds) for row in known if row.direction == direction]
        if not rows:
            raise HybridcompError(
                "the cluster has no figure for copies between device and host: measure it again, "
                'or write "host" into its description'
            )
        return Curve.through(rows).at(nbytes)

    def kernel(self, kind: Kind, dtype: str, size: float, rank: int = 0) -> Estimate:
        """Return the seconds of a kernel of ``size`` on ``rank`` (see ``Kernel``).

        A block that was not measured counts as a matrix product; a product that was not measured
        takes the rank's FLOP/s. Raises HybridcompError where the rank has neither.
        """
        if not size:
            return NOTHING
        by_flops = kind not in ("elementwise", "adam", "host_adam")
        for one in (kind, "product") if by_flops else (kind,):
            curve = self._kernels.get((rank, one, dtype))
            if curve is not None:
                return curve.at(size)
        rate = self.ranks[rank].flops.get(dtype) if by_flops else None
        if rate is None:
            listed = ", ".join(sorted(self.ranks[rank].flops)) or "none"
            raise HybridcompError(
                f"the cluster has no figure for {kind} in {dtype} on rank {rank}: measure it "
                f"again, or describe it; it has matrix products in: {listed}"
            )
        return rate.inverse(size)

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """Compute speed of every rank relative to the fastest (1.0): by blocks, else FLOP/s."""
        return speeds_of(self.ranks, self.kernels)

    @property
    def machines(self) -> tuple[tuple[int, str], ...]:
        """Node and device of every rank, for a job to check that it runs on this cluster.

        Empty for a described cluster; node -1 where the user's ``hierarchy`` set the nodes.
        """
        if self.by_hand:
            return ()
        known = self.made.get("nodes known by") != "compression.hierarchy"
        return tuple((rank.node if known else -1, rank.device) for rank in self.ranks)

    @cached_property
    def _links(self) -> Links:
        of_site = self.ranks_per_node * self.nodes_per_site
        return Links(self.links, self.ranks_per_node, self.uplinks, of_site)

    @cached_property
    def _codings(self) -> dict[tuple[Any, ...], Curve]:
        return coded(self.codecs)

    @cached_property
    def _host_codings(self) -> dict[tuple[Any, ...], Curve]:
        return coded(self.host_codecs)

    @cached_property
    def _kernels(self) -> dict[tuple[Any, ...], Curve]:
        return curves(
            ((row.rank, row.kind, row.dtype), row.size, row.seconds) for row in self.kernels
        )

    @cached_property
    def _costs(self) -> MessageCosts:
        fixed = {row.setting.partition("(")[0]: row.fixed_size for row in self.codecs}
        return MessageCosts(
            self.encoded, self.channels, self._parts_of,
            lambda setting: fixed.get(setting.partition("(")[0], True),
        )  # fmt: skip

    def _parts_of(self, row: Encoded | Carried) -> float:
        parts = self.encoded_parts(
            row.operation, row.setting, row.dtype, row.numel, row.nbytes, row.ranks, row.nodes,
            row.beside != "alone",
        )  # fmt: skip
        return Estimate.total(parts).value
