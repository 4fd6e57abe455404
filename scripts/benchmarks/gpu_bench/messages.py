"""Send messages as the patches do: choose a codec, encode, write the ledger.

Only this rank of the group exists and messages arrive at once, which leaves this rank's work: on a
GPU, the host's time to submit it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import (
    AllGather,
    AllReduce,
    AllToAll,
    Channel,
    Channels,
    Message,
    ReduceScatter,
    ReduceToOwners,
    Shards,
)
from hybridcomp.channels.residuals.pieces import Piece
from hybridcomp.codecs import Codec
from hybridcomp.collectives.wire import transport
from hybridcomp.collectives.wire.chunking import OwnedRange, chunk_ranges
from hybridcomp.config import CompressionConfig

#: ranks of the group by default; this rank is in the middle
RANKS, ME = 8, 3
#: parameters of a bucket
PIECES = 64
#: dp has error feedback, tp has none; no errors are sampled, as in most steps
BLOCK = {
    "tp": {"codec": "blockint"},
    "dp": {"codec": "blockint", "error_feedback": True},
    "min_bytes": 0,
    "ledger": {"sample_every": 0},
}


class _Done(dist.Work):
    """Handle of a message that has arrived."""

    def wait(self, timeout: object = None) -> bool:
        """Return at once."""
        return True


@contextmanager
def group_without_wire(ranks: int = RANKS) -> Iterator[None]:
    """Yield a default group of ``ranks`` in which calls of torch.distributed do nothing.

    The group is torch's fake process group, whose all-gather would copy.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    work = _Done()

    def done(*_: object, **__: object) -> dist.Work:
        return work

    # torch prefixes every line of an error with "[rank3]: ", once per group ever created
    before = sys.excepthook
    dist.init_process_group("fake", rank=min(ME, ranks - 1), world_size=ranks, store=FakeStore())
    sys.excepthook = before
    try:
        with (
            mock.patch.object(dist, "all_to_all_single", done),
            mock.patch.object(dist, transport.GATHER, done),
        ):
            yield
    finally:
        dist.destroy_process_group()


class Messages:
    """Messages of all kinds with ``codec``; ``values``: this rank's tensor (1-D).

    Create it inside ``group_without_wire`` of as many ``ranks``. Received buffers keep their
    previous bytes, which decode as fast.
    """

    def __init__(self, codec: Codec, values: Tensor, ranks: int = RANKS) -> None:
        self.codec, self.values, numel = codec, values, values.numel()
        channels = Channels(CompressionConfig.parse(BLOCK))
        self.tp, self.dp = channels["tp"], channels["dp"]
        self.out, self.shard = torch.empty_like(values), values[: numel // ranks].clone()
        self.shards = Shards(values[: numel // ranks * ranks], numel // ranks)
        each = numel // ranks // 64 * 64
        self.splits = [each, each - 64, each + 64] + [each] * (ranks - 4)
        self.splits.append(numel - sum(self.splits))
        self.pieces = (Piece("weight", 0, numel),)
        edges = chunk_ranges(numel, PIECES)
        self.bucket = tuple(
            Piece(f"weight {i}", 0, stop - low) for i, (low, stop) in enumerate(edges)
        )
        step = max(1, ranks // PIECES)
        self.owners = tuple(
            OwnedRange(*edge, ((ME + i * step) % ranks,)) for i, edge in enumerate(edges)
        )
        self.even = tuple(
            OwnedRange(*edge, (rank,)) for rank, edge in enumerate(chunk_ranges(numel, ranks))
        )

    def _run(self, channel: Channel, message: Message[Any]) -> None:
        """Send ``message`` with the codec under test, after asking the policy."""
        channel.codec(message.numel, message.dtype, None)
        sent = message.send(channel, self.codec)
        if not isinstance(sent, list):
            sent.wait()

    def _fields(self) -> dict[str, Any]:
        return {"numel": self.values.numel(), "dtype": self.values.dtype, "group": None}

    def all_reduce(self) -> None:
        """All-reduce an activation."""
        self._run(self.tp, AllReduce(values=self.out, **self._fields()))

    def all_reduce_feedback(self) -> None:
        """All-reduce a gradient with error feedback."""
        self._run(self.dp, AllReduce(values=self.out, parameters=self.pieces, **self._fields()))

    def all_gather(self) -> None:
        """All-gather a sequence shard."""
        self._run(self.tp, AllGather(shard=self.shard, out=self.out, **self._fields()))

    def reduce_scatter(self) -> None:
        """Reduce-scatter an activation along its sequence."""
        self._run(self.tp, ReduceScatter(shards=self.shards, **self._fields()))

    def all_to_all(self) -> None:
        """Exchange heads for tokens, all-to-all."""
        self._run(self.tp, AllToAll(values=self.values, out=self.out, **self._fields()))

    def experts(self) -> None:
        """Send tokens to experts, all-to-all, with a different number for each rank."""
        message = AllToAll(
            values=self.values, out=self.out, in_splits=self.splits, out_splits=self.splits,
            **self._fields(),
        )  # fmt: skip
        self._run(self.tp, message)

    def to_owners(self, channel: Channel, ranges: tuple[OwnedRange, ...]) -> None:
        """Reduce a bucket of ZeRO 1 or 2 to the owners of its ranges."""
        message = ReduceToOwners(
            values=self.values, parameters=self.bucket, ranges=ranges, **self._fields()
        )
        self._run(channel, message)

    def kinds(self) -> dict[str, Callable[[], None]]:
        """Return all kinds of messages by name."""
        return {
            "all_reduce": self.all_reduce,
            "all_reduce feedback": self.all_reduce_feedback,
            "all_gather": self.all_gather,
            "reduce_scatter": self.reduce_scatter,
            "all_to_all": self.all_to_all,
            "all_to_all uneven": self.experts,
        }

    def buckets(self) -> dict[str, Callable[[], None]]:
        """Return messages of a bucket with PIECES owners, and with every rank as an owner."""
        return {
            "to owners": lambda: self.to_owners(self.tp, self.owners),
            "to owners feedback": lambda: self.to_owners(self.dp, self.owners),
            "to all as owners": lambda: self.to_owners(self.tp, self.even),
        }
