"""Send a message through a channel with a given codec, bypassing the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hybridcomp.channels import (
    AllGather,
    AllReduce,
    AllToAll,
    Channel,
    OwnedRange,
    ReduceScatter,
    ReduceScatterHandle,
    ReduceToOwners,
)
from hybridcomp.channels.residuals.pieces import Piece
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import Handle
from hybridcomp.dimensions import Direction


@dataclass(eq=False, kw_only=True)
class _Taken(AllReduce):
    """All-reduce in which upstream handles some sums."""

    takes: Mapping[str, Tensor] | None

    def taken(self) -> Mapping[str, Tensor] | None:
        """Return the test's choice."""
        return self.takes


def all_reduce(
    channel: Channel,
    values: Tensor,
    codec: Codec,
    group: Any,
    *,
    pieces: Sequence[Piece] | None = None,
    taken: Mapping[str, Tensor] | None = None,
) -> Handle:
    """Sum ``values`` in place."""
    message = _Taken(
        numel=values.numel(), dtype=values.dtype, group=group, values=values, parameters=pieces,
        takes=taken,
    )  # fmt: skip
    return message.send(channel, codec)


def reduce_scatter(
    channel: Channel,
    shards: Sequence[Tensor],
    codec: Codec,
    group: Any,
    *,
    pieces: Sequence[Sequence[Piece]] | None = None,
    direction: Direction = "forward",
    async_op: bool = False,
) -> ReduceScatterHandle:
    """Sum this rank's shard."""
    message = ReduceScatter(
        numel=sum(shard.numel() for shard in shards), dtype=shards[0].dtype, group=group,
        direction=direction, shards=shards, parameters=pieces, async_op=async_op,
    )  # fmt: skip
    return message.send(channel, codec)


def reduce_to_owners(
    channel: Channel,
    values: Tensor,
    ranges: Sequence[OwnedRange],
    codec: Codec,
    group: Any,
    *,
    pieces: Sequence[Piece] | None = None,
) -> list[Tensor]:
    """Reduce ``values`` to the owners of ``ranges``."""
    message = ReduceToOwners(
        numel=values.numel(), dtype=values.dtype, group=group, values=values, ranges=ranges,
        parameters=pieces,
    )  # fmt: skip
    return message.send(channel, codec)


def all_gather(
    channel: Channel, shard: Tensor, out: Tensor, codec: Codec, group: Any, async_op: bool = False
) -> Handle:
    """Gather ``shard`` into ``out``."""
    message = AllGather(
        numel=shard.numel(), dtype=shard.dtype, group=group, shard=shard, out=out,
        async_op=async_op,
    )  # fmt: skip
    return message.send(channel, codec)


def all_to_all(channel: Channel, out: Tensor, values: Tensor, codec: Codec, group: Any) -> Handle:
    """Exchange equal chunks of ``values`` into ``out``."""
    message = AllToAll(
        numel=values.numel(), dtype=values.dtype, group=group, values=values, out=out
    )
    return message.send(channel, codec)
