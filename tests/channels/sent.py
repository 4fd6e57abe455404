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
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import Handle


@dataclass(eq=False, kw_only=True)
class _Taken(AllReduce):
    """All-reduce in which upstream handles some sums."""

    takes: Mapping[str, Tensor] | None

    def taken(self) -> Mapping[str, Tensor] | None:
        """Return the test's choice."""
        return self.takes


def _of(values: Tensor, group: Any) -> dict[str, Any]:
    return {"numel": values.numel(), "dtype": values.dtype, "group": group}


def all_reduce(
    channel: Channel, values: Tensor, codec: Codec, group: Any, *, pieces: Any = None,
    taken: Mapping[str, Tensor] | None = None,
) -> Handle:  # fmt: skip
    """Sum ``values`` in place."""
    message = _Taken(**_of(values, group), values=values, parameters=pieces, takes=taken)
    return message.send(channel, codec)


def reduce_scatter(
    channel: Channel, shards: Sequence[Tensor], codec: Codec, group: Any, *, pieces: Any = None,
    **more: Any,
) -> ReduceScatterHandle:  # fmt: skip
    """Sum this rank's shard."""
    fields = {**_of(shards[0], group), "numel": sum(shard.numel() for shard in shards), **more}
    return ReduceScatter(**fields, shards=shards, parameters=pieces).send(channel, codec)


def reduce_to_owners(
    channel: Channel, values: Tensor, ranges: Sequence[OwnedRange], codec: Codec, group: Any, *,
    pieces: Any = None,
) -> list[Tensor]:  # fmt: skip
    """Reduce ``values`` to the owners of ``ranges``."""
    fields = {**_of(values, group), "values": values, "ranges": ranges}
    return ReduceToOwners(**fields, parameters=pieces).send(channel, codec)


def all_gather(
    channel: Channel, shard: Tensor, out: Tensor, codec: Codec, group: Any, **more: Any
) -> Handle:
    """Gather ``shard`` into ``out``."""
    return AllGather(**_of(shard, group), shard=shard, out=out, **more).send(channel, codec)


def all_to_all(channel: Channel, out: Tensor, values: Tensor, codec: Codec, group: Any) -> Handle:
    """Exchange equal chunks of ``values`` into ``out``."""
    return AllToAll(**_of(values, group), values=values, out=out).send(channel, codec)
