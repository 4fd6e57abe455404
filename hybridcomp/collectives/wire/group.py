"""Group: the ranks of a message, in one level, in two (nodes times local ranks) or in more.

torch.distributed's functions look a group up in global tables, 2 us each; here the properties that
messages need are plain data, and a channel keeps one ``Group`` for each process group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.quantized_residual import Residual
from hybridcomp.collectives.wire.handle import Meter
from hybridcomp.job import peer_liveness

P = TypeVar("P")
#: maximum total weight of the plans that a group caches: thousands of plans for a few ranks, or
#: sixteen plans with a part for each of 4,096 ranks
MOST_PLANNED = 1 << 16

#: called with the values to encode, the positions in them that no codec block may cross, and their
#: residual
Probe = Callable[[Tensor, Sequence[int], Residual | None], None]


def resolved(group: ProcessGroup | None) -> ProcessGroup:
    """Return ``group``, or the default group for None. This rank is a member."""
    found = dist.group.WORLD if group is None else group
    assert found is not None, "torch.distributed is not initialized"
    return found


@dataclass(eq=False)
class Group:
    """A process group, as this rank sees it.

    Attributes:
        rank, size: this rank's group rank, and the number of ranks.
        remote: group ranks on other nodes; in more than two levels, in other largest units.
        levels: the grid of nodes times local ranks; None: messages have one level.
        ring: fraction of its bytes in a ring that this rank sends to another node: 1.0 if the next
            rank is on another node, else 0.0.
        width, local: number of ranks of a node, which sum their values before each encodes a slice
            of the sum; and this rank's index among these ranks. 1 and 0 in one level.
        encoders, index: number of ranks that encode one element, and this rank's index among these
            ranks. In one level they are all ranks of the group, in two levels one of each node.
        plans: cached plans of collectives, by the properties that equal messages share (``keep``).
            They reference neither the group nor tensors of a message, and are freed with the group.
        hops: for a group without its own process group, which only gathers: the groups that gather
            one after the other in its place; ranks of the first vary fastest. Else empty.
    """

    process_group: ProcessGroup
    rank: int
    size: int
    remote: frozenset[int] = frozenset()
    levels: Levels | None = None
    ring: float = field(init=False)
    width: int = field(init=False, default=1)
    local: int = field(init=False, default=0)
    encoders: int = field(init=False)
    index: int = field(init=False)
    plans: dict[tuple[object, ...], Any] = field(init=False, default_factory=dict, repr=False)
    _weight: int = field(init=False, default=0)
    hops: tuple[Group, ...] = ()

    def __post_init__(self) -> None:
        self.ring = float((self.rank + 1) % self.size in self.remote)
        self.encoders, self.index = self.size, self.rank
        if self.levels is not None:
            self.width, self.local = self.levels.width, self.levels.local
            self.encoders, self.index = self.levels.nodes, self.levels.node

    @classmethod
    def of(
        cls,
        group: ProcessGroup | None,
        remote: frozenset[int] = frozenset(),
        levels: Levels | None = None,
    ) -> Group:
        """Make the ``Group`` of torch's ``group``; None is the default group."""
        found = resolved(group)
        return cls(found, found.rank(), found.size(), remote, levels)

    def keep(self, key: tuple[object, ...], plan: P, weight: int = 1) -> P:
        """Keep ``plan`` for the next message with the same ``key``, and return it.

        The plan must hold references to objects that the key contains by identity. ``weight``:
        number of its parts; if all plans together weigh too much, earlier ones are dropped.
        """
        if self._weight + weight > MOST_PLANNED:
            self.plans.clear()
            self._weight = 0
        self.plans[key] = plan
        self._weight += weight
        return plan

    @cached_property
    def backends(self) -> dict[str, str]:
        """Return for each device type the backend that carries its tensors."""
        config = dist.get_backend_config(self.process_group)
        return dict(part.split(":") for part in config.split(","))

    @cached_property
    def global_ranks(self) -> tuple[int, ...]:
        """Return the ranks of the job, by group rank."""
        return tuple(dist.get_process_group_ranks(self.process_group))

    @cached_property
    def limit(self) -> timedelta | None:
        """Return the time limit of a message over gloo; None: no limit."""
        return peer_liveness.time_limit(self.process_group)

    @property
    def receivers(self) -> Sequence[int]:
        """Return the group ranks whose shards of a reduce-scatter this rank encodes."""
        if self.levels is None:
            return range(self.size)
        return self.levels.column


@dataclass(frozen=True)
class Levels:
    """Position of a rank in a group with equally many ranks on each of its nodes.

    In more than two levels a "node" is a largest unit (a site), whose ranks sum level by level:
    ``parts`` has the groups in which this rank sums, one per level, the innermost first. The local
    index then enumerates positions in these groups, the last group varying fastest.
    """

    grid: tuple[tuple[int, ...], ...]  # group ranks by node, then by local index
    node: int  # row of this rank in the grid
    local: int  # column of this rank in the grid
    inner: Group  # ranks of this node, by local index in two levels, else ascending
    outer: Group  # ranks with this local index, by node; all but this rank are remote
    parts: tuple[Group, ...] = ()  # empty in two levels
    # codecs for the sums of ``stages``; None or missing: native
    codecs: tuple[Codec | None, ...] = ()

    @property
    def nodes(self) -> int:
        return len(self.grid)

    @property
    def width(self) -> int:
        """Return the number of ranks of a node."""
        return len(self.grid[0])

    @property
    def stages(self) -> tuple[Group, ...]:
        """Return the groups over which the ranks of a node sum, in this order."""
        return self.parts or (self.inner,)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Return the number of nodes and the widths of ``stages``, the last first, if group ranks
        are numbered in this order, as by most launchers; else an empty tuple.
        """
        shape = (self.nodes, *(group.size for group in reversed(self.stages)))
        numbers = torch.arange(self.nodes * self.width, device="cpu").view(shape)
        columns = numbers.permute(*reversed(range(len(shape)))).reshape(self.width, self.nodes)
        return shape if columns.T.tolist() == [list(row) for row in self.grid] else ()

    @cached_property
    def gathered(self) -> Group:
        """Return the ranks whose shards this rank decodes in a gather; in two levels ``outer``.

        These ranks have this rank's slice on the first level; they are ordered by local index, then
        by node.
        """
        later = self.stages[1:]
        if not later:
            return self.outer
        place = 0
        for group in later:
            place = place * group.size + group.rank
        size = self.nodes * self.width // self.stages[0].size
        me, hops = place * self.nodes + self.node, (self.outer, *reversed(later))
        return Group(self.outer.process_group, me, size, hops=hops)

    @cached_property
    def order(self) -> Sequence[int]:
        """Return the local indices of the ranks of ``inner``, in the order of its ranks."""
        row = self.grid[self.node]
        return sorted(range(self.width), key=row.__getitem__)

    @cached_property
    def column(self) -> Sequence[int]:
        """Return the group ranks with this local index, by node."""
        return [row[self.local] for row in self.grid]

    @cached_property
    def node_of(self) -> dict[int, int]:
        """Return the node of every group rank as a dict."""
        return {rank: node for node, row in enumerate(self.grid) for rank in row}

    def by_column(self, device: torch.device) -> Tensor:
        """Return all group ranks on ``device``, int64, ordered by local index, then by node."""
        found = self._columns.get(device)
        if found is None:
            ranks = [rank for column in zip(*self.grid, strict=True) for rank in column]
            found = self._columns[device] = torch.tensor(ranks, device=device)
        return found

    @cached_property
    def _columns(self) -> dict[torch.device, Tensor]:
        return {}


@dataclass(eq=False)
class Transfer:
    """Codec, group, meter and cuts of a message.

    Attributes:
        codec: the same on all ranks.
        meter: filled in by the collective, and complete once that has finished.
        cuts: ascending positions that no codec block may cross; the same on all ranks.
        flush: whether residuals are sent for the last time. A lossless codec then encodes the sum
            of values and residual in fp32, since rounding it to 16 bits would leave a residual.
    """

    codec: Codec
    group: Group
    meter: Meter
    cuts: Sequence[int] = ()
    flush: bool = field(default=False, kw_only=True)


@dataclass(eq=False)
class Reduction(Transfer):
    """Transfer of values that are summed, with error feedback. In two levels cuts and residuals
    refer to this rank's slice of its node's sum, ``chunk_ranges(numel, width)[group.local]``.

    Attributes:
        residual: residual of the first quantization, as long as the values that this rank encodes;
            updated in place, 0 afterwards where nothing was quantized.
        owner_residual: residual of the second quantization, as long as this rank's chunk of the
            first residual, ``chunk_ranges(len, group.encoders)[group.index]``. Only reductions that
            quantize twice use it. Each residual is set on all ranks or on none.
        probe: called with the values before they are encoded.
        kept: in two levels, this rank's fp32 slice of the node's sum over earlier messages, which
            is added to the slice of this message (``keep_to_owners``, ``keep_shards``).
    """

    residual: Residual | None = None
    owner_residual: Residual | None = None
    probe: Probe | None = None
    kept: Tensor | None = None

    def between_nodes(self, codec: Codec) -> Reduction:
        """Return the same reduction among the ranks with this local index, one on each node."""
        assert self.group.levels is not None
        outer = self.group.levels.outer
        return Reduction(
            codec,
            outer,
            self.meter,
            self.cuts,
            self.residual,
            self.owner_residual,
            self.probe,
            flush=self.flush,
        )
