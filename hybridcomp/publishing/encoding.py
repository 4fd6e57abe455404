"""Compare this rank's weights with the last version, and encode what changed, piece by piece."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from hybridcomp.codecs import StepCode
from hybridcomp.errors import PublishError
from hybridcomp.publishing.checksums import bytes_of, compare, digest_of
from hybridcomp.publishing.parts import (
    ALONE,
    BYTES,
    RAW,
    SAME,
    STEPS,
    PieceEntry,
    part_end,
    part_head,
)
from hybridcomp.publishing.quantized import EIGHT, unpacked
from hybridcomp.publishing.spools import ALIGN
from hybridcomp.publishing.stretches import WeightRange
from hybridcomp.publishing.weights import NAMES, PATTERNS, DividedWeights, Owned

#: values of a bucket: the most that are encoded at once
BUCKET = 1 << 23
#: pieces of fewer values are sent as they are: a model of their steps would be larger
LEAST = 512
CODEC = StepCode()


class Sink(Protocol):
    """Receiver of the bytes of one part."""

    def write(self, data: memoryview, /) -> object:
        """Take bytes; they may be overwritten after the call."""


@dataclass
class PartSummary:
    """Seconds and bytes that writing a part took, and its digest."""

    nbytes: int = 0
    changed: int = 0
    compare_s: float = 0.0
    encode_s: float = 0.0
    wire_s: float = 0.0
    codec_s: float = 0.0  # of encode_s, those of the codec
    link_s: float = 0.0  # of wire_s, those of writing
    raw_nbytes: int = 0  # of pieces that changed, as they are
    digest: str = ""


@dataclass
class Shard:
    """One owned part with the copy of it that was published last, by pieces."""

    owned: Owned
    kind: str
    dtype: torch.dtype = field(init=False)
    stretch: WeightRange = field(init=False)
    reference: Tensor | None = None
    digests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stretch, self.dtype = self.owned.stretch, PATTERNS[self.kind]

    def pieces(self, bucket: int) -> Iterator[tuple[int, int]]:
        """Yield the borders of its pieces."""
        return self.stretch.pieces(bucket)

    def values(self, low: int, high: int) -> Tensor:
        """Return values ``low`` to ``high`` as they are now, on the host in the published dtype."""
        held, begin = self.owned.held, self.owned.low
        if held.part is not None:
            return held.part(begin + low, begin + high).to("cpu")
        found = held.read().detach()
        if found.numel() != held.stretch.numel:
            raise PublishError(
                f"{self.stretch.name}: expected {held.stretch.numel} values on this rank, found "
                f"{found.numel()}; start a new Publisher where parameters change their sizes"
            )
        if found.dtype != self.dtype and found.dtype in NAMES:
            raise PublishError(
                f"{self.stretch.name}: expected {NAMES[self.dtype]}, in which it is published, "
                f"found {NAMES[found.dtype]}; start a new Publisher, to an empty folder"
            )
        some = found.reshape(-1)[begin + low : begin + high].to("cpu", self.dtype)
        # one value is contiguous to torch whatever its stride, and cannot be seen as bytes then
        return some.contiguous() if len(some) != 1 else some.clone().as_strided((1,), (1,))


class PartEncoder:
    """This rank's part of every version, and the 16-bit copy that it keeps on the host.

    Attributes:
        shards: what this rank publishes.
        raw: whether changes are sent as they are, without a codec.
    """

    def __init__(self, weights: DividedWeights, bucket: int = BUCKET) -> None:
        self.bucket = bucket
        self.raw = False
        self.shards = [Shard(one, weights.table[one.stretch.name][1]) for one in weights.owned]
        self._room = torch.empty(0, dtype=torch.uint8)  # of the largest piece, once one is written

    @torch.no_grad()
    def write(self, sink: Sink, head: dict[str, object], rank: int, full: bool) -> PartSummary:
        """Write a part of the version that ``head`` names, and keep its values as reference.

        1 compare a piece with the reference
        2 encode it, and copy it over the reference
        3 hand it to ``sink``

        ``full``: encode without reference. After an error the references are of no version.
        """
        told, entries = PartSummary(), list[PieceEntry]()
        if not len(self._room):
            largest = max((min(self.bucket, one.stretch.numel) for one in self.shards), default=0)
            room = torch.empty(CODEC.wire_nbytes(largest, torch.bfloat16), dtype=torch.uint8)
            self._room = room

        def put(data: memoryview) -> None:
            begun = time.perf_counter()
            sink.write(data)
            told.link_s += time.perf_counter() - begun
            told.nbytes += len(data)

        put(memoryview(part_head(rank)))
        for shard in self.shards:
            if shard.reference is None:
                assert full, "only a full version needs no reference"
                shard.reference = torch.empty(shard.stretch.numel, dtype=shard.dtype)
            digests: list[str] = []
            for number, (low, high) in enumerate(shard.pieces(self.bucket)):
                before = "" if full else shard.digests[number]
                entry, payload = self._piece(shard, low, high, before, told)
                entries.append(entry)
                put(payload)  # 3
                digests.append(entry.after)
            shard.digests = digests
        rows = [entry.row() for entry in entries]
        end, told.digest = part_end(rank, {**head, "rank": rank, "pieces": rows})
        put(memoryview(end))
        told.wire_s = told.link_s
        return told

    def _piece(
        self, shard: Shard, low: int, high: int, before: str, told: PartSummary
    ) -> tuple[PieceEntry, memoryview]:
        """Encode values ``low`` to ``high`` of ``shard``; returns its entry and padded payload."""
        assert shard.reference is not None
        reference = shard.reference[low:high]
        # 1
        begun = time.perf_counter()
        values = shard.values(low, high)
        changed, after = compare(values, reference) if before else (values.numel(), "")
        compared = time.perf_counter()
        # 2
        coding, nbytes, payload = SAME, 0, self._room[:0]
        if changed:
            before_it = reference if before else None
            coding, nbytes, payload = self._encode(values, before_it, shard.kind, told)
            reference.copy_(values)
        width = 1 if shard.kind in EIGHT else 2
        told.raw_nbytes += width * values.numel() if changed else 0
        after = after or digest_of(values)
        digest = ""
        if len(payload):
            is_same = coding == RAW and len(payload) == nbytes
            digest = after if is_same else digest_of(payload)
        entry = PieceEntry(
            shard.stretch.cut(low, high), coding, told.nbytes, nbytes, changed, before, after,
            digest,
        )  # fmt: skip
        told.compare_s += compared - begun
        told.encode_s += time.perf_counter() - compared
        told.changed += changed
        return entry, bytes_of(payload)

    def _encode(
        self, values: Tensor, reference: Tensor | None, kind: str, told: PartSummary
    ) -> tuple[str, int, Tensor]:
        """Encode into the room, or take values as they are where that is no longer.

        Returns the coding, its bytes, and these bytes with the zeros behind them.
        """
        begun = time.perf_counter()
        coding, plain = RAW, values
        if kind in EIGHT:
            coding, plain = BYTES, unpacked(values, kind).view(torch.uint8)
        nbytes = plain.nbytes
        if not self.raw and values.numel() >= LEAST:
            coded = CODEC.encode(values, reference, self._room)
            if coded < nbytes:
                coding, nbytes = (ALONE if reference is None else STEPS), coded
        padded = -(-nbytes // ALIGN) * ALIGN
        told.codec_s += time.perf_counter() - begun
        if coding in (RAW, BYTES):
            if padded == nbytes:
                return coding, nbytes, plain.view(torch.uint8)
            self._room[:nbytes] = plain.view(torch.uint8)
        self._room[nbytes:padded] = 0
        return coding, nbytes, self._room[:padded]

    @torch.no_grad()
    def take(self) -> dict[WeightRange, str]:
        """Copy the present weights as reference; returns the checksum of each piece."""
        found = {}
        for shard in self.shards:
            reference = torch.empty(shard.stretch.numel, dtype=shard.dtype)
            shard.digests = []
            for low, high in shard.pieces(self.bucket):
                reference[low:high].copy_(shard.values(low, high))
                shard.digests.append(digest_of(reference[low:high]))
                found[shard.stretch.cut(low, high)] = shard.digests[-1]
            shard.reference = reference
        return found

    def forget(self) -> None:
        """Free the references; the next version has to be a full one."""
        for shard in self.shards:
            shard.reference, shard.digests = None, []
