"""Compute the bytes that messages of a step take on a rank: residuals, references, buffers.

Residuals and references are exact where the messages are; buffers are those of the largest message,
at their most (of DDP those of all its buckets, which may be under way at once).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.quantized_residual import BLOCK, nbytes_of

#: values of all shares that DeepSpeed's gathers send at once; half as many as deltas
MOST_GATHERED = 1 << 27
#: as ``autotune.trials.StepTraffic`` has it; exchanges are all-to-alls, sends go to one rank
Way = Literal["sum", "own", "scatter", "gather", "exchange", "send"]
#: bytes of a value in fp32
FP32 = 4


@dataclass(frozen=True)
class RankMessages:
    """Messages of a dimension in a step, as one rank sends them.

    Attributes:
        numels: values of each message: of a sum, exchange or send on every rank, of a gather on all
            ranks together.
        how: sums for all ranks, to the owners of ranges (ZeRO 1 and 2), to the owners of shards
            (ZeRO 3, FSDP2), gathers, exchanges, or sends.
        dtype: of the values.
        ranks: of the group.
        width: ranks of a node that sum before one of them encodes; 1 in one level.
        fused: whether the codec has kernels for all chunks, as on a GPU: two ranks then take two
            hops, and sums of an all-reduce lie in no memory.
        copied: whether a gather of deltas keeps a copy of this rank's share, as DeepSpeed's do.
        tabled: whether each message is copied into a table first and all are under way at once, as
            in DDP.
        at_once: payloads of sends and receives that a rank holds at once.
        staged: whether each goes through memory of the host, as a GPU's do over gloo.
    """

    numels: tuple[int, ...]
    how: Way
    dtype: torch.dtype
    ranks: int
    width: int = 1
    fused: bool = True
    copied: bool = True
    tabled: bool = False
    at_once: int = 1
    staged: bool = False

    @property
    def encoders(self) -> int:
        """Return the number of ranks that encode one element."""
        return self.ranks // self.width

    @property
    def hops(self) -> int:
        """Return how often a value is quantized.

        A single message to owners of equal ranges goes to them directly.
        """
        if self.how == "own":
            return 1 if self.encoders == 2 or len(self.numels) == 1 else 2
        if self.how == "sum":
            return 1 if self.encoders == 2 and not self.fused else 2
        return 1


def residual_nbytes(messages: RankMessages, bits: int) -> tuple[int, int]:
    """Return the bytes of the residuals of sums: of what this rank sends, of sums that it owns.

    ``bits``: any of ``quantized_residual.BITS``.
    """
    sent = owned = 0
    for numel in messages.numels:
        own = -(-numel // messages.width)
        if messages.how == "scatter" and bits != 32:  # shards begin between blocks
            shard = -(-own // messages.encoders)
            own = -(-shard // BLOCK) * BLOCK * messages.encoders
        sent += nbytes_of(bits, own)
        if messages.hops == 2:
            owned += nbytes_of(bits, -(-own // messages.encoders))
    return sent, owned


def reference_nbytes(messages: RankMessages) -> int:
    """Return the bytes of the copies of this rank's share of gathered parameters."""
    if not messages.copied:
        return 0
    return sum(-(-n // messages.ranks) for n in messages.numels) * messages.dtype.itemsize


def buffer_nbytes(messages: RankMessages, codec: Codec, deltas: bool = False) -> int:
    """Return the bytes of buffers while the largest of ``messages`` is under way.

    Payloads that are sent and that arrive, sums and parts of other ranks that no tensor of the
    caller has room for, and the fp32 differences of lossy deltas, of all ranks and of this one.
    Of tables those of all messages.
    Low-rank codecs send factors, which are small: 0.
    """
    if codec.low_rank is not None or not messages.numels:
        return 0
    if messages.tabled:
        tables = sum(messages.numels) * messages.dtype.itemsize
        return tables + sum(_of_one(messages, numel, codec) for numel in messages.numels)
    numel = max(messages.numels)
    if messages.how == "gather":
        if messages.copied:
            numel = min(numel, MOST_GATHERED // (2 if deltas else 1))
        lossy = deltas and not codec.lossless
        differences = FP32 * (numel + -(-numel // messages.ranks)) if lossy else 0
        return _of_gather(messages, numel, codec) + differences
    return _of_one(messages, numel, codec)


def _of_gather(messages: RankMessages, numel: int, codec: Codec) -> int:
    """Return the bytes of a gather: payloads, and in two levels what the node gathers, twice."""
    share, encoders = -(-numel // messages.ranks), messages.encoders
    payloads = codec.wire_nbytes(share, messages.dtype) * (encoders + 1)
    if messages.width == 1:
        return payloads
    size = messages.dtype.itemsize  # a column between nodes stays while the node gathers
    return size * encoders * share + max(payloads, size * numel)


def _of_one(messages: RankMessages, numel: int, codec: Codec) -> int:
    """Return the bytes of one sum, exchange or send of ``numel`` values."""
    if messages.how == "send":
        return messages.at_once * codec.wire_nbytes(numel, messages.dtype)
    own = -(-numel // messages.width)
    between = _between(messages, own, codec)
    if messages.width == 1:
        return between
    # the ranks of a node send whole values, and sum stretches in fp32
    return FP32 * own + max(messages.dtype.itemsize * numel, between)


def _between(messages: RankMessages, own: int, codec: Codec) -> int:
    """Return the bytes of a sum or exchange of ``own`` values between those that encode."""
    others = messages.encoders - 1
    part = -(-own // messages.encoders)
    slot = codec.wire_nbytes(part, messages.dtype)
    sums = messages.dtype if codec.lossless else torch.float32  # as ``sent_dtype`` has it
    exchanged, gathered = 2 * others * slot, (others + 2) * codec.wire_nbytes(part, sums)
    if messages.how == "own":
        return exchanged + FP32 * part
    if messages.how != "sum":
        return exchanged
    if messages.hops == 1:
        summed = 0 if messages.dtype == torch.float32 else FP32 * own
        return 2 * codec.wire_nbytes(own, messages.dtype) + summed
    if messages.fused:
        return exchanged + gathered
    return max(exchanged, gathered) + FP32 * part


def staged_nbytes(messages: RankMessages, codec: Codec) -> int:
    """Return the bytes of the host's copies of the largest of ``messages``, 0 where none are made.

    Payloads that are sent and that arrive in one of its exchanges or gathers. Low rank: 0.
    """
    if not messages.staged or codec.low_rank is not None or not messages.numels:
        return 0
    numel, dtype = max(messages.numels), messages.dtype
    if messages.how == "send":
        return messages.at_once * codec.wire_nbytes(numel, dtype)
    if messages.how == "gather":
        share = -(-numel // messages.ranks)
        return (messages.encoders + 1) * codec.wire_nbytes(share, dtype)
    own, encoders = -(-numel // messages.width), messages.encoders
    if messages.how == "sum" and messages.hops == 1:
        return 2 * codec.wire_nbytes(own, dtype)
    # what has arrived of an all-reduce's exchange stays while its sums are gathered
    slots = 2 * encoders if messages.how == "sum" else 2 * (encoders - 1)
    return slots * codec.wire_nbytes(-(-own // encoders), dtype)
