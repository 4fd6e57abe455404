"""Messages whose host time may grow with the group: unequal shards, two levels, agreements.

As in ``messages``, only this rank exists and messages arrive at once. Messages are so short that
the copies and sums, which run on the CPU here, cost little beside the host's work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from benchmarks.gpu_bench.messages import ME, RANKS
from hybridcomp.channels import (
    AllGather,
    AllReduce,
    AllToAll,
    Channel,
    Channels,
    ReduceScatter,
    Shards,
)
from hybridcomp.channels.residuals.pieces import Piece
from hybridcomp.codecs import Codec, make_codec
from hybridcomp.collectives import Group, Levels
from hybridcomp.collectives.topology import Nodes
from hybridcomp.collectives.wire.group import resolved
from hybridcomp.config import CompressionConfig

#: ranks per node; parameters of a coalesced gather; elements of each parameter; side of a matrix
WIDTH, CUTS, PIECE, SIDE = 4, 64, 40, 64
#: elements of all shards in two levels, the same for every group size: the CPU copies them here
WHOLE = 1 << 12
#: split sizes that an exchange with new lengths cycles through
LISTS = 64
NATIVE = {"min_bytes": 0, "ledger": {"sample_every": 0}}
GUARDED = {"guard": {"error": 0.5}}


class _Placed(Nodes):
    """Nodes of WIDTH ranks each, with levels but no process groups."""

    def __init__(self, ranks: int) -> None:
        super().__init__([rank // WIDTH for rank in range(ranks)], "bench")
        whole, (node, local) = resolved(None), divmod(ME, WIDTH)
        grid = tuple(tuple(range(at, at + WIDTH)) for at in range(0, ranks, WIDTH))
        others = frozenset(range(len(grid))) - {node}
        inner, outer = Group(whole, local, WIDTH), Group(whole, node, len(grid), others)
        remote = frozenset(range(ranks)) - frozenset(grid[node])
        self._whole = Group(whole, ME, ranks, remote, Levels(grid, node, local, inner, outer))

    def group(self, group: ProcessGroup | None, *, two_levels: bool) -> Group:
        """Return the default group, in two levels."""
        return self._whole


def _channel(dimension: Any, block: Mapping[str, Any], nodes: Nodes | None = None) -> Channel:
    channels = Channels(CompressionConfig.parse({**block, **NATIVE}))
    channels.nodes = nodes
    return channels[dimension]


class _Cut(AllGather):
    """Coalesced gather of CUTS parameters."""

    def cuts(self, codec: Codec) -> list[int]:
        """Return the offset of each parameter but the first."""
        return list(range(PIECE, CUTS * PIECE, PIECE))


class GroupMessages:
    """All of these messages with ``codec`` and ``dtype``, in a group of ``ranks``.

    Create it inside ``group_without_wire``.
    """

    def __init__(self, codec: Codec, dtype: torch.dtype, ranks: int = RANKS) -> None:
        self.codec, self.dtype, self.ranks = codec, dtype, ranks
        self.tp = _channel("tp", {"tp": {"codec": "blockint"}})
        placed = _Placed(ranks)
        self.deep = _channel("dp", {"dp": {"codec": "blockint", "error_feedback": False}}, placed)
        self.whole = torch.zeros(WHOLE // ranks * ranks, dtype=dtype)
        self.shards = Shards(self.whole, self.whole.numel() // ranks)
        self.shard, self.stretch = self.shards[ME], torch.zeros(1 << 14, dtype=dtype)
        self.cut = torch.zeros(CUTS * PIECE, dtype=dtype)
        self.cut_out = torch.empty(ranks * CUTS * PIECE, dtype=dtype)
        lengths = (
            [32 + (index + rank) % 48 if rank != ME else 64 for rank in range(ranks)]
            for index in range(LISTS)
        )
        self.lengths: Iterator[tuple[list[int], int]] = cycle((each, sum(each)) for each in lengths)
        self.tokens = torch.zeros(80 * ranks, dtype=dtype)
        self._prepare_agreements()

    def _prepare_agreements(self) -> None:
        channels = Channels(CompressionConfig.parse({"dp": {"codec": "powersgd"}, **NATIVE}))
        channels.factors.learn("weight", (SIDE, SIDE))
        self.low_rank, self.factored = channels["dp"], make_codec("powersgd", rank=2)
        self.matrix = torch.zeros(SIDE * SIDE, dtype=self.dtype)
        guarded = CompressionConfig.parse({"tp": {"codec": "blockint", **GUARDED}})
        self.guard = Channels(guarded).guard

    def _fields(self, values: Tensor) -> dict[str, Any]:
        return {"numel": values.numel(), "dtype": values.dtype, "group": None}

    def new_splits(self) -> None:
        """Send tokens to experts, all-to-all, with split sizes that have not occurred before."""
        lengths, total = next(self.lengths)
        splits, values = list(lengths), self.tokens[:total]  # a new list, as upstream passes
        message = AllToAll(
            values=values, in_splits=splits, out_splits=splits, **self._fields(values)
        )
        message.send(self.tp, self.codec).wait()

    def cut_gather(self) -> None:
        """All-gather the shards of many parameters in one message."""
        message = _Cut(shard=self.cut, out=self.cut_out, **self._fields(self.cut))
        message.send(self.tp, self.codec).wait()

    def deep_all_reduce(self) -> None:
        """All-reduce in two levels."""
        message = AllReduce(values=self.stretch, **self._fields(self.stretch))
        message.send(self.deep, self.codec).wait()

    def deep_gather(self) -> None:
        """All-gather in two levels."""
        message = AllGather(shard=self.shard, out=self.whole, **self._fields(self.shard))
        message.send(self.deep, self.codec).wait()

    def deep_scatter(self) -> None:
        """Reduce-scatter in two levels."""
        message = ReduceScatter(shards=self.shards, **self._fields(self.whole))
        message.send(self.deep, self.codec).wait()

    def matrices(self) -> None:
        """All-reduce a gradient by low-rank factors."""
        pieces = [Piece("weight", 0, SIDE * SIDE)]
        message = AllReduce(values=self.matrix, parameters=pieces, **self._fields(self.matrix))
        message.send(self.low_rank, self.factored).wait()

    def decide(self) -> None:
        """Sum the guard's samples over the job and compare them with the limits."""
        self.guard.decide(1, torch.device("cpu"))

    def kinds(self) -> dict[str, Callable[[], None]]:
        """Return all kinds by name."""
        return {
            "all_to_all new splits": self.new_splits,
            "all_gather cuts": self.cut_gather,
            "all_reduce levels": self.deep_all_reduce,
            "all_gather levels": self.deep_gather,
            "reduce_scatter levels": self.deep_scatter,
            "low rank": self.matrices,
            "guard": self.decide,
        }
