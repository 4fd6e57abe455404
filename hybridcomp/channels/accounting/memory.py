"""Compute the bytes that hybridcomp uses on a rank, from a block and the messages of a step.

Used before a job (``hybridcomp validate``, the planner) and at its start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from hybridcomp.channels.accounting.rank_messages import (
    FP32,
    REDUCED_EACH,
    RankMessages,
    buffer_nbytes,
    copy_nbytes,
    frozen_nbytes,
    node_sums_nbytes,
    reference_nbytes,
    residual_nbytes,
    staged_nbytes,
)
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.quantized_residual import BITS
from hybridcomp.config.block import CompressionConfig
from hybridcomp.config.policy import Traffic
from hybridcomp.dimensions import ROWS, Dimension, Direction

#: bytes per published value
PUBLISHED = 2


class MemoryItem(NamedTuple):
    """One item of memory that hybridcomp uses on a rank: ``nbytes`` on the device or host."""

    name: str
    nbytes: int
    on_host: bool = False


@dataclass(frozen=True)
class KeptState:
    """State that a block keeps between messages.

    Attributes:
        residual_bits: bits of a residual's value; 0: no error feedback.
        references: whether parameters are gathered as deltas.
    """

    residual_bits: int
    references: bool

    @classmethod
    def of(cls, config: CompressionConfig) -> KeptState:
        """Return the state that ``config`` keeps."""
        bits = config.dp.residual_bits if config.error_feedback("dp") else 0
        return cls(bits, config.zero.delta and config.active("zero"))

    def smaller(self, config: CompressionConfig) -> Iterator[tuple[str, KeptState]]:
        """Yield, in words, other settings of ``config`` that would keep less."""
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


def taken(
    config: CompressionConfig,
    messages: Mapping[Dimension, Sequence[RankMessages]],
    state: KeptState | None = None,
) -> list[MemoryItem]:
    """Return the memory that ``config`` uses for ``messages`` by dimension; no items of 0 bytes.

    A dimension may have messages of several groups or dtypes. Those that the block leaves native
    take nothing. ``state``: replaces the state that the block keeps.
    """
    state = state or KeptState.of(config)
    found, buffers, staged = Counter[str](), [0], [0]
    for name, several in messages.items():
        for every in several:
            found.update(_kept(config, name, every, state))
            deltas = state.references and ROWS[name].sends_deltas
            bits = state.residual_bits if ROWS[name].keeps_residuals else 0
            for codec, sent in _sent(config, name, every):
                buffers.append(buffer_nbytes(sent, codec, deltas, bits))
                staged.append(staged_nbytes(sent, codec, bits))
    found["wire buffers"] = max(buffers)
    items = [MemoryItem(name, nbytes) for name, nbytes in found.items()]
    items.append(MemoryItem("staging", max(staged), on_host=True))
    return [item for item in items if item.nbytes]


def _kept(
    config: CompressionConfig, name: Dimension, every: RankMessages, state: KeptState
) -> dict[str, int]:
    """Return the bytes, by item, that stay allocated between steps for the messages ``every``."""
    codec, found = config.codecs().get((name, "forward")), dict[str, int]()
    if codec is None:
        return found
    sent = replace(every, numels=tuple(_encoded(config, name, every, "forward")))
    if ROWS[name].keeps_residuals and state.residual_bits:
        if codec.low_rank is not None:
            sent = replace(sent, how="scatter", width=1)
        first, second = residual_nbytes(sent, codec, state.residual_bits)
        found = {"residuals": first, "residuals of sums": second}
    if name == "dp" and config.dp.accumulate == "node" and every.how in REDUCED_EACH:
        found["sums of micro-batches"] = node_sums_nbytes(every)
    if state.references and ROWS[name].sends_deltas:
        found["references of deltas"] = reference_nbytes(sent)
    if name == "zero" and config.zero.keeps_copy:
        bits = None if config.zero.secondary == "exact" else 8
        found["secondary copies"] = copy_nbytes(every, bits)
    return found


def _sent(
    config: CompressionConfig, name: Dimension, every: RankMessages
) -> Iterator[tuple[Codec, RankMessages]]:
    """Yield the messages in ``every`` that are encoded in each direction, with their codec."""
    for way in ROWS[name].directions:
        codec = config.codecs().get((name, way))
        if codec is not None:
            yield codec, replace(every, numels=tuple(_encoded(config, name, every, way)))


def _encoded(
    config: CompressionConfig, name: Dimension, sent: RankMessages, way: Direction
) -> Iterator[int]:
    """Yield the lengths of the messages that have a codec after all ramps."""
    policy = config.policy()
    for numel in sent.numels:
        traffic = Traffic(name, way, sent.dtype, numel, sent.ranks, policy.settles_at)
        if policy.choose(traffic) is not None:
            yield numel


def meetings(config: CompressionConfig, share: int, islands: int) -> list[MemoryItem]:
    """Return the memory that meetings of ``islands`` islands take on a rank of ``share`` weights.

    All values are fp32. State: the weights at the start, the momentum, the residuals, and with late
    means the weights from which the next message is counted. Messages, for as many meetings as may
    be pending: the sent values, with late means and error feedback also the island's change by
    then, and all islands' decoded values. If islands are separate jobs, all islands' payloads stay
    on the host, and only the payloads of the meeting that ends are decoded.
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


def frozen(
    config: CompressionConfig, numels: Mapping[tuple[torch.dtype, bool], int]
) -> list[MemoryItem]:
    """Return the memory of the frozen weights that every rank keeps.

    ``numels``: number of values by dtype and by whether they are vectors, which are kept exactly.
    """
    kept = config.zero.keeps_frozen
    if kept is None or not config.enabled:
        return []
    nbytes = sum(
        frozen_nbytes(numel, dtype, None if is_vector else kept.bits)
        for (dtype, is_vector), numel in numels.items()
    )
    found = MemoryItem("frozen weights", nbytes, on_host=kept.on == "host")
    return [found] if nbytes else []


def published(config: CompressionConfig, share: int) -> list[MemoryItem]:
    """Return the memory of the 16-bit copies that a rank publishes, on the host.

    One copy is the last version, the other the version being written beside the training.
    """
    if config.publish is None:
        return []
    copies = 1 if config.publish.wait else 2
    return [MemoryItem("copies of published weights", copies * PUBLISHED * share, on_host=True)]


def rolled_out(config: CompressionConfig, numel: int, ranks: int, width: int) -> list[MemoryItem]:
    """Return the memory that ``gathered`` keeps of ``numel`` 16-bit weights between roll-outs.

    ``ranks``: ranks of the job, ``width`` of them on each node.
    """
    codec = config.gathered.codec_of() if config.gathered else None
    if config.gathered is None or codec is None or not codec.references:
        return []
    kept = PUBLISHED * numel // (width if 1 < width < ranks else 1)
    on_host = config.gathered.keep == "host"
    return [MemoryItem("weights kept for roll-outs", kept, on_host)]


def memory_lines(items: Iterable[MemoryItem]) -> Iterator[str]:
    """Yield a line with the bytes of all ``items``, if any, and where they are."""
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
