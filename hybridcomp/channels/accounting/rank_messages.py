"""Compute the bytes that a step's messages use on a rank: residuals, references, buffers.

Residuals and references are exact if the messages are. Buffers are the peak of the largest message
(under DDP of all buckets, which may be pending at once).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from hybridcomp.codecs import make_codec
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.quantized_residual import BLOCK, nbytes_of
from hybridcomp.codecs.residual_runs import LONGEST
from hybridcomp.codecs.varying_pieces import WORDS_NBYTES

#: most values, of all ranks together, in one gather message of DeepSpeed; with deltas half as many
MOST_GATHERED = 1 << 27
#: as in ``autotune.trials.StepTraffic``; exchanges are all-to-alls, sends go to one rank
Way = Literal["sum", "own", "scatter", "gather", "exchange", "send"]
#: sums that upstream runs in every micro-batch of a step, at ZeRO 2 and 3 and under fully_shard
REDUCED_EACH: tuple[Way, ...] = ("own", "scatter")
#: bits per weight under ``expcode``, for fp32 and for 16 bits: averages over trainings
EXACT_BITS = (27.2, 11.2)
#: bytes of an fp32 value, and its bits
FP32, FULL = 4, 32


@dataclass(frozen=True)
class RankMessages:
    """Messages of a dimension in a step, as one rank sends them.

    Attributes:
        numels: values of each message: per rank for a sum, exchange or send, of all ranks together
            for a gather.
        how: kind of message: sums for all ranks, for owners of ranges (ZeRO 1 and 2) or for owners
            of shards (ZeRO 3, FSDP2); gathers, exchanges or sends.
        dtype: dtype of the values.
        ranks: ranks of the group.
        width: ranks of a node that sum before one of them encodes; 1 in one level.
        on_gpu: whether the messages are on a GPU.
        copied: whether a gather of deltas keeps a copy of this rank's share, as DeepSpeed's do.
        tabled: whether each message is first copied into a table and all are pending at once, as in
            DDP.
        at_once: payloads of sends and receives that a rank holds at once.
        staged: whether each message is staged in host memory, as from a GPU over gloo.
    """

    numels: tuple[int, ...]
    how: Way
    dtype: torch.dtype
    ranks: int
    width: int = 1
    on_gpu: bool = True
    copied: bool = True
    tabled: bool = False
    at_once: int = 1
    staged: bool = False

    @property
    def encoders(self) -> int:
        """Return the number of ranks that encode an element."""
        return self.ranks // self.width

    def fused(self, codec: Codec) -> bool:
        """Return whether ``codec`` has kernels for all chunks: then even two ranks sum in two hops,
        and the sums of an all-reduce are never written to memory.
        """
        return self.on_gpu and codec.fuses

    def hops(self, codec: Codec) -> int:
        """Return how often ``codec`` quantizes a value.

        The only message of a step to owners has equal ranges, so it goes to the owners directly.
        """
        if self.how == "own":
            return 1 if self.encoders == 2 or len(self.numels) == 1 else 2
        if self.how == "sum":
            return 1 if self.encoders == 2 and not self.fused(codec) else 2
        return 1


def residual_nbytes(messages: RankMessages, codec: Codec, bits: int) -> tuple[int, int]:
    """Return the bytes of this rank's residuals: of values that it sends, and of sums that it owns.

    ``bits``: any of ``quantized_residual.BITS``.
    """
    sent = owned = 0
    for numel in messages.numels:
        own = -(-numel // messages.width)
        # few-bit residuals of shards begin at block borders
        if messages.how == "scatter" and bits != 32:
            shard = -(-own // messages.encoders)
            own = -(-shard // BLOCK) * BLOCK * messages.encoders
        sent += nbytes_of(bits, own)
        if messages.hops(codec) == 2:
            owned += nbytes_of(bits, -(-own // messages.encoders))
    return sent, owned


def reference_nbytes(messages: RankMessages) -> int:
    """Return the bytes of the copies that a rank keeps of its own shares of gathered parameters."""
    if not messages.copied:
        return 0
    return sum(-(-n // messages.ranks) for n in messages.numels) * messages.dtype.itemsize


def copy_nbytes(messages: RankMessages, bits: int | None) -> int:
    """Return the bytes of this rank's slice of its node's secondary copy of gathered parameters.

    ``bits``: bits under ``blockint``; None: unencoded. Returns 0 in one level, without nodes.
    """
    if messages.width == 1 or messages.how != "gather":
        return 0
    slices = [-(-numel // messages.width) for numel in messages.numels]
    if bits is None:
        return messages.dtype.itemsize * sum(slices)
    codec = make_codec("blockint", bits=bits)
    return sum(codec.wire_nbytes(numel, messages.dtype) for numel in slices)


def frozen_nbytes(numel: int, dtype: torch.dtype, bits: int | None) -> int:
    """Return the bytes of ``numel`` frozen values that a rank keeps, exactly or in ``bits`` bits.

    Exact values count with the average bits of trained weights (``EXACT_BITS``).
    """
    if bits is None:
        return round(numel * EXACT_BITS[dtype != torch.float32] / 8)
    return make_codec("blockint", bits=bits).wire_nbytes(numel, dtype)


def node_sums_nbytes(messages: RankMessages) -> int:
    """Return the bytes of the sums of micro-batches that a rank keeps for its node.

    It covers all messages, with or without a codec; 0 in one level, where nothing is kept.
    """
    if messages.width == 1:
        return 0
    return FP32 * sum(-(-numel // messages.width) for numel in messages.numels)


def buffer_nbytes(
    messages: RankMessages, codec: Codec, deltas: bool = False, residual_bits: int = 0
) -> int:
    """Return the peak bytes of buffers while the largest of ``messages`` is pending.

    It includes payloads sent and received, sums and other ranks' parts that do not fit the caller's
    tensors, residuals unpacked to fp32, and for lossy deltas the fp32 differences, of all ranks and
    once more of this rank. Messages in tables (``tabled``) are pending together, so all count. On a
    GPU the words of encoders of variable size count too. Low-rank codecs count 0: factors are
    small.

    Args:
        messages: messages of one dimension.
        codec: codec of the messages.
        deltas: whether parameters are gathered as deltas.
        residual_bits: bits of the residuals of sums; 0: there are none.
    """
    if codec.low_rank is not None or not messages.numels:
        return 0
    words = 0 if codec.fixed_size or not messages.on_gpu else WORDS_NBYTES
    if messages.tabled:
        tables = sum(messages.numels) * messages.dtype.itemsize
        each = (_of_one(messages, numel, codec, residual_bits) for numel in messages.numels)
        return words + tables + sum(each)
    numel = max(messages.numels)
    if messages.how == "gather":
        if messages.copied:
            numel = min(numel, MOST_GATHERED // (2 if deltas else 1))
        lossy = deltas and not codec.lossless
        differences = FP32 * (numel + -(-numel // messages.ranks)) if lossy else 0
        return words + _of_gather(messages, numel, codec) + differences
    return words + _of_one(messages, numel, codec, residual_bits)


def _of_gather(messages: RankMessages, numel: int, codec: Codec) -> int:
    """Return the bytes of a gather: payloads, in two levels also the values gathered natively."""
    share, encoders = -(-numel // messages.ranks), messages.encoders
    if codec.references:
        # all messages after the first are encoded against earlier values
        codec = codec.against(torch.empty(0, dtype=torch.float32, device="cpu"))
    payloads = codec.wire_nbytes(share, messages.dtype) * (encoders + 1)
    if messages.width == 1:
        return payloads
    size = messages.dtype.itemsize  # a column between nodes stays allocated while the node gathers
    return size * encoders * share + max(payloads, size * numel)


def _of_one(messages: RankMessages, numel: int, codec: Codec, bits: int) -> int:
    """Return the bytes of one sum, exchange or send of ``numel`` values."""
    if messages.how == "send":
        return messages.at_once * codec.wire_nbytes(numel, messages.dtype)
    own = -(-numel // messages.width)
    between = _between(messages, own, codec, bits)
    if messages.width == 1:
        return between
    # ranks of a node exchange whole values and sum slices of them in fp32
    return FP32 * own + max(messages.dtype.itemsize * numel, between)


def _between(messages: RankMessages, own: int, codec: Codec, bits: int) -> int:
    """Return the bytes of a sum or exchange of ``own`` values between the ranks that encode."""
    others = messages.encoders - 1
    part = -(-own // messages.encoders)
    sums = _dtype_of_sums(messages, codec)
    given = sums if messages.width > 1 else messages.dtype
    dtype = sums if bits else given
    if messages.how == "sum" and messages.hops(codec) == 1:
        summed = 0 if given == torch.float32 else FP32 * own
        return _exchanged(messages, own, 1, codec.wire_nbytes(own, dtype), codec, bits) + summed
    exchanged = _exchanged(messages, part, others, codec.wire_nbytes(part, dtype), codec, bits)
    gathered = (others + 2) * codec.wire_nbytes(part, sums)
    if messages.how == "own":
        return exchanged + FP32 * part
    if messages.how != "sum":
        return exchanged
    if messages.fused(codec):
        return exchanged + gathered
    in_residual = bits == FULL  # a rank then sums in the memory of its fp32 residual
    return max(exchanged, gathered) + FP32 * part * (not in_residual)


def _dtype_of_sums(messages: RankMessages, codec: Codec) -> torch.dtype:
    """Return the dtype in which fp32 values are encoded, as in ``sent_dtype``."""
    return messages.dtype if codec.lossless else torch.float32


def _exchanged(
    messages: RankMessages, part: int, others: int, slot: int, codec: Codec, bits: int
) -> int:
    """Return the bytes of ``others`` payloads sent and received, or of encoding them if larger.

    To update its residuals, a rank unpacks them and decodes its payloads, both to fp32: on a GPU
    before it receives payloads, on a CPU while payloads are sent and received. It unpacks the
    residual of its own part once payloads have arrived.
    """
    few, payloads = 0 < bits < FULL, others * slot
    if not bits or (codec.fuses and (few or messages.on_gpu)):
        return 2 * payloads
    # payloads are decoded into the sum
    is_pair = messages.how == "sum" and messages.hops(codec) == 1
    if not messages.on_gpu:
        return 2 * payloads + FP32 * part * (few * others + (not is_pair))
    at_once = part if codec.fixed_size else others * part
    if few:
        at_once = min(at_once, max(part, LONGEST))
    encoding = FP32 * at_once * (few + (not is_pair))
    return payloads + max(payloads + FP32 * part * (few and not is_pair), encoding)


def staged_nbytes(messages: RankMessages, codec: Codec, residual_bits: int = 0) -> int:
    """Return the bytes of host copies of the largest of ``messages``, 0 if none are staged.

    Copied are the payloads that one exchange or gather sends and receives. Low-rank codecs count 0.
    """
    if not messages.staged or codec.low_rank is not None or not messages.numels:
        return 0
    numel, dtype = max(messages.numels), messages.dtype
    if messages.how == "send":
        return messages.at_once * codec.wire_nbytes(numel, dtype)
    if messages.how == "gather":
        share = -(-numel // messages.ranks)
        if codec.references:
            codec = codec.against(torch.empty(0, dtype=torch.float32, device="cpu"))
        return (messages.encoders + 1) * codec.wire_nbytes(share, dtype)
    own, encoders = -(-numel // messages.width), messages.encoders
    sums = _dtype_of_sums(messages, codec)
    dtype = sums if residual_bits or messages.width > 1 else dtype
    if messages.how == "sum" and messages.hops(codec) == 1:
        return 2 * codec.wire_nbytes(own, dtype)
    part = -(-own // encoders)
    exchanged = (encoders - 1) * codec.wire_nbytes(part, dtype)
    if messages.how != "sum":
        return 2 * exchanged
    # if one kernel sums and encodes, arrived payloads stay while the sums are gathered
    stays = exchanged if messages.fused(codec) else 0
    return max(2 * exchanged, stays + (encoders + 1) * codec.wire_nbytes(part, sums))
