"""Compute the bytes that hybridcomp takes on a rank, from a block and the messages of a step.

Used before a job (``hybridcomp validate``, the planner) and at its start. Residuals and references
are exact where the messages are; wire buffers are those of the largest message, at their most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.quantized_residual import BITS, BLOCK, nbytes_of
from hybridcomp.config.block import CompressionConfig
from hybridcomp.dimensions import ROWS, Dimension
from hybridcomp.policy import Traffic

#: values of all shares that DeepSpeed's gathers send at once; half as many as deltas
MOST_GATHERED = 1 << 27
#: as ``autotune.trials.StepTraffic`` has it
Way = Literal["sum", "own", "scatter", "gather"]
#: bytes of a value in fp32, and of one that is published
FP32, PUBLISHED = 4, 2


class MemoryItem(NamedTuple):
    """One thing that hybridcomp keeps on a rank; ``nbytes`` on the device, or on the host."""

    name: str
    nbytes: int
    on_host: bool = False


@dataclass(frozen=True)
class RankMessages:
    """Messages of ``dp`` or ``zero`` in a step, as one rank sends them.

    Attributes:
        numels: values of each message: of a sum on every rank, of a gather on all ranks together.
        how: sums for all ranks, to the owners of ranges (ZeRO 1 and 2), to the owners of shards
            (ZeRO 3, FSDP2), or gathers.
        dtype: of the values.
        ranks: of the group.
        width: ranks of a node that sum before one of them encodes; 1 in one level.
        fused: whether the codec has kernels for both hops, so that two ranks take two hops.
        copied: whether a gather of deltas keeps a copy of this rank's share, as DeepSpeed's do.
    """

    numels: tuple[int, ...]
    how: Way
    dtype: torch.dtype
    ranks: int
    width: int = 1
    fused: bool = True
    copied: bool = True

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


@dataclass(frozen=True)
class KeptState:
    """State that a block keeps from message to message.

    Attributes:
        residual_bits: bits of a residual's value; 0: no error feedback.
        references: whether parameters are gathered as deltas.
    """

    residual_bits: int
    references: bool

    @classmethod
    def of(cls, config: CompressionConfig) -> KeptState:
        """Return what ``config`` keeps."""
        bits = config.dp.residual_bits if config.error_feedback("dp") else 0
        return cls(bits, config.zero.delta and config.active("zero"))

    def smaller(self, config: CompressionConfig) -> Iterator[tuple[str, KeptState]]:
        """Yield other settings that ``config`` could have and that keep less, in words."""
        fewer = [bits for bits in BITS if bits < self.residual_bits]
        few = [(f'"error_feedback": {{"bits": {bits}}} under "dp"', bits) for bits in fewer]
        codec = config.codecs()["dp", "forward"]
        if self.residual_bits and codec is not None and codec.low_rank is None:
            few.append(('"error_feedback": false under "dp"', 0))
        less = [(told, replace(self, residual_bits=bits)) for told, bits in few]
        yield from less
        gathered = config.codecs()["zero", "forward"]
        if self.references and gathered is not None:
            without = '"delta": false under "zero"'
            if gathered.references:
                without = f'another codec than {gathered.name} under "zero"'
            yield without, replace(self, references=False)
            for told, state in less:
                yield f"{told} and {without}", replace(state, references=False)


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

    Payloads that are sent and that arrive, the fp32 sum that this rank owns, and the fp32
    differences of lossy deltas. Low-rank codecs send factors, which are small: 0.
    """
    if codec.low_rank is not None or not messages.numels:
        return 0
    numel, ranks = max(messages.numels), messages.ranks
    if messages.how == "gather":
        if messages.copied:
            numel = min(numel, MOST_GATHERED // (2 if deltas else 1))
        share = codec.wire_nbytes(-(-numel // ranks), messages.dtype)
        differences = FP32 * numel if deltas and not codec.lossless else 0
        return share * (ranks + 1) + differences
    own = -(-numel // messages.width)
    return 2 * codec.wire_nbytes(own, messages.dtype) + FP32 * -(-own // messages.encoders)


def taken(
    config: CompressionConfig,
    messages: Mapping[Dimension, RankMessages],
    state: KeptState | None = None,
) -> list[MemoryItem]:
    """Return what ``config`` takes for ``messages`` of ``dp`` and ``zero``; nothing of 0 bytes.

    Messages that the block leaves native take nothing. ``state``: in place of what the block keeps.
    """
    state = state or KeptState.of(config)
    found: list[MemoryItem] = []
    buffers = [0]
    for name, every in messages.items():
        codec = config.codecs().get((name, "forward"))
        if codec is None:
            continue
        sent = replace(every, numels=tuple(_encoded(config, name, every)))
        if ROWS[name].keeps_residuals and state.residual_bits:
            if codec.low_rank is not None:
                sent = replace(sent, how="scatter", width=1)
            first, second = residual_nbytes(sent, state.residual_bits)
            found += [MemoryItem("residuals", first), MemoryItem("residuals of sums", second)]
        deltas = state.references and ROWS[name].settings == "parameters"
        if deltas:
            found.append(MemoryItem("references of deltas", reference_nbytes(sent)))
        buffers.append(buffer_nbytes(sent, codec, deltas))
    found.append(MemoryItem("wire buffers", max(buffers)))
    return [item for item in found if item.nbytes]


def _encoded(config: CompressionConfig, name: Dimension, sent: RankMessages) -> Iterator[int]:
    """Yield the lengths of the messages that have a codec once ramps have ended."""
    policy = config.policy()
    for numel in sent.numels:
        traffic = Traffic(name, "forward", sent.dtype, numel, sent.ranks, policy.settles_at)
        if policy.choose(traffic) is not None:
            yield numel


def meetings(config: CompressionConfig, share: int, islands: int) -> list[MemoryItem]:
    """Return what ``islands`` islands take on a rank that has ``share`` of the weights, in fp32.

    State: the start, the momentum, what messages left out, and with late means the weights that the
    next message counts from. Messages, as many as are under way at once: what was sent, with late
    means also what the island had moved by then, and what all islands sent. Of islands that are
    jobs it lies encoded on the host, and only that of the meeting that ends is decoded.
    """
    sync = config.sync
    if not sync.acts:
        return []
    late, fragment = sync.staleness > 0, -(-share // sync.fragments)
    copies = 1 + (sync.outer.momentum > 0) + sync.error_feedback + late
    found = [MemoryItem("state of islands", FP32 * share * copies)]
    at_once, sent = sync.most_under_way + 1, 1 + (late and sync.error_feedback)
    decoded = islands * (at_once if sync.jobs is None else 1)
    nbytes = FP32 * fragment * (at_once * sent + decoded)
    found.append(MemoryItem("messages of islands", nbytes))
    if sync.jobs is not None:
        codec = config.codecs().get(("sync", "forward"))
        each = FP32 * fragment if codec is None else codec.wire_nbytes(fragment, torch.float32)
        found.append(MemoryItem("messages of islands", at_once * islands * each, on_host=True))
    return found


def published(config: CompressionConfig, share: int) -> list[MemoryItem]:
    """Return the 16-bit copy of the ``share`` of the weights that a rank publishes, on the host."""
    if config.publish is None:
        return []
    return [MemoryItem("copy of published weights", PUBLISHED * share, on_host=True)]


def memory_lines(items: Iterable[MemoryItem]) -> Iterator[str]:
    """Yield a line with the bytes of all ``items``, if any, by where they are."""
    every = list(items)
    if every:
        parts = [f"{one.name} {size(one.nbytes)}{' (host)' * one.on_host}" for one in every]
        yield f"{'memory':13} of a rank: {', '.join(parts)}"


def size(nbytes: float) -> str:
    """Format bytes for people: three digits and a unit of 1000."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes:.0f} B"
