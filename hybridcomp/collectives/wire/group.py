"""Group: the ranks that a message goes between, and whether they are seen as one level or as two.

torch.distributed's functions look a group up in tables of the world, 2 us each; what a message
needs of its group stands here as data, and a channel keeps one ``Group`` for each process group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.wire.handle import Meter

#: is shown what is about to be encoded, where no codec block may reach across in it, and the
#: residual of the same values
Probe = Callable[[Tensor, Sequence[int], Tensor | None], None]


def resolved(group: ProcessGroup | None) -> ProcessGroup:
    """``group``, or the default one for None. This rank is a member."""
    found = dist.group.WORLD if group is None else group
    assert found is not None, "torch.distributed is not initialized"
    return found


@dataclass(eq=False)
class Group:
    """A process group, as this rank sees it.

    Attributes:
        rank, size: of this rank in the group, and how many there are.
        remote: group ranks on other nodes.
        levels: how it is seen as nodes times local ranks; None: its messages take the flat way.
        ring: share of a ring's bytes that this rank sends to another node, 0.0 or 1.0.
        width, local: ranks of a node that add up their values before one of them encodes a stretch
            of the sum, and which of them this rank is; 1 and 0 in one level.
        encoders, index: ranks that encode one element, and which of them this rank is: all of the
            group in one level, one of each node in two.
        global_ranks, backends: by group rank and by type of device, once they were asked for.
        limit: how long a message over gloo may take, once one was sent; None: no limit.
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
    global_ranks: tuple[int, ...] = field(init=False, default=())
    backends: dict[str, str] = field(init=False, default_factory=dict)
    limit: timedelta | None = field(init=False, default=None)

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
        """The group of torch's ``group``; None is the default group."""
        found = resolved(group)
        return cls(found, found.rank(), found.size(), remote, levels)

    @property
    def receivers(self) -> Sequence[int]:
        """Group ranks whose shards of a reduce-scatter this rank encodes."""
        if self.levels is None:
            return range(self.size)
        return [row[self.levels.local] for row in self.levels.grid]


@dataclass(frozen=True)
class Levels:
    """This says where a rank stands in a group with equally many ranks on each of its nodes."""

    grid: tuple[tuple[int, ...], ...]  # group ranks by node, then by local index
    node: int  # the row of this rank
    local: int  # its column
    inner: Group  # the ranks of this node, by local index
    outer: Group  # the ranks with this local index, by node; all others are remote

    @property
    def nodes(self) -> int:
        return len(self.grid)

    @property
    def width(self) -> int:
        """Ranks of a node."""
        return len(self.grid[0])


@dataclass(eq=False)
class Transfer:
    """How values travel: with which codec, between whom, and who counts.

    Attributes:
        codec: the same on all ranks.
        meter: filled in, completely so once the collective is through.
        cuts: ascending elements where no codec block may reach across; the same on all ranks.
        flush: whether what residuals hold is sent for the last time. A lossless codec then takes
            the fp32 sum of values and residual: rounded to 16 bits, the rest would stay behind.
    """

    codec: Codec
    group: Group
    meter: Meter
    cuts: Sequence[int] = ()
    flush: bool = field(default=False, kw_only=True)


@dataclass(eq=False)
class Reduction(Transfer):
    """How values are summed. In two levels cuts and residuals are those of this rank's stretch of
    its node's sum, ``chunk_ranges(numel, group.width)[group.local]``.

    Attributes:
        residual: fp32, as long as what this rank encodes: error feedback of the first
            quantization, updated in place; 0 afterwards where nothing was quantized.
        owner_residual: the same of the second, as long as this rank's chunk of it,
            ``chunk_ranges(len, group.encoders)[group.index]``. Only reductions that quantize twice
            use it. Each of the two is given on all ranks or on none.
        probe: is called with what is about to be encoded.
    """

    residual: Tensor | None = None
    owner_residual: Tensor | None = None
    probe: Probe | None = None

    def between_nodes(self, codec: Codec) -> Reduction:
        """The same reduction among the ranks with this local index, one on each node."""
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
