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
from hybridcomp.publishing.part_buffers import ALIGN
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
from hybridcomp.publishing.stretches import WeightRange
from hybridcomp.publishing.weights import NAMES, PATTERNS, DividedWeights, Owned

#: most values that are encoded at once
BUCKET = 1 << 23
#: pieces of fewer values are sent raw: a model of their steps would be larger
LEAST = 512
CODEC = StepCode()


class Sink(Protocol):
    """Receives the bytes of one part."""

    def write(self, data: memoryview, /) -> object:
        """Accept bytes, which may be overwritten after the call."""


@dataclass
class PartSummary:
    """Seconds and bytes of writing a part, and its digest."""

    nbytes: int = 0
    changed: int = 0
    compare_s: float = 0.0
    encode_s: float = 0.0
    wire_s: float = 0.0
    codec_s: float = 0.0  # part of encode_s spent in the codec
    link_s: float = 0.0  # part of wire_s spent writing
    raw_nbytes: int = 0  # raw bytes of the pieces that changed
    digest: str = ""


@dataclass
class Shard:
    """One owned part, with a copy of its last published values, by pieces.

    A version written beside the training gets its own copy, which then replaces that one.
    """

    owned: Owned
    kind: str
    dtype: torch.dtype = field(init=False)
    stretch: WeightRange = field(init=False)
    reference: Tensor | None = None
    digests: list[str] = field(default_factory=list)
    snapshot: Tensor | None = None  # weights of the version that is written beside the training
    is_on_host: bool = True  # whether the weights were on the host when the snapshot began

    def __post_init__(self) -> None:
        self.stretch, self.dtype = self.owned.stretch, PATTERNS[self.kind]

    def pieces(self, bucket: int) -> Iterator[tuple[int, int]]:
        """Yield the boundaries of its pieces."""
        return self.stretch.pieces(bucket)

    def values(self, low: int, high: int) -> Tensor:
        """Return current values ``low`` to ``high`` on the host, in the published dtype."""
        some = self._now(low, high).to("cpu", self.dtype)
        # torch considers a single value contiguous whatever its stride, but cannot view it as bytes
        # then
        return some.contiguous() if len(some) != 1 else some.clone().as_strided((1,), (1,))

    def _now(self, low: int, high: int) -> Tensor:
        """Return current values ``low`` to ``high``, 1-D, on their own device."""
        held, begin = self.owned.held, self.owned.low
        if held.part is not None:
            return held.part(begin + low, begin + high)
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
        return found.reshape(-1)[begin + low : begin + high]

    def begin_snapshot(self, bucket: int) -> torch.device:
        """Copy weights that are on a device, on its current stream; return the device.

        Weights on the host are left to ``end_snapshot``.
        """
        place = self.owned.held.read().device
        self.is_on_host = place.type == "cpu"
        if self.snapshot is None:
            is_pinned = place.type == "cuda"
            self.snapshot = torch.empty(self.stretch.numel, dtype=self.dtype, pin_memory=is_pinned)
        for low, high in () if self.is_on_host else self.pieces(bucket):
            is_ordered = place.type == "cuda"
            self.snapshot[low:high].copy_(self._now(low, high), non_blocking=is_ordered)
        return place

    def make_room(self) -> None:
        """Have memory for the next snapshot, so that the training need not wait for its pages.

        Copying to new pages takes six times as long.
        """
        if self.snapshot is None and self.is_on_host:
            self.snapshot = torch.empty(self.stretch.numel, dtype=self.dtype).fill_(0)

    def end_snapshot(self, bucket: int) -> None:
        """Copy weights that are on the host."""
        assert self.snapshot is not None
        for low, high in self.pieces(bucket) if self.is_on_host else ():
            self.snapshot[low:high].copy_(self.values(low, high))

    def check_snapshot(self, bucket: int) -> None:
        """Raise PublishError if weights on the host have changed since the snapshot."""
        assert self.snapshot is not None
        for low, high in self.pieces(bucket) if self.is_on_host else ():
            now, then = self.values(low, high), self.snapshot[low:high]
            if compare(now, then)[0]:
                raise PublishError(
                    f"{self.stretch.name}: it was changed while it was being copied beside the "
                    "training; call publisher.copied() before anything but an optimizer of torch "
                    "changes weights, or publish with wait=True; the next version is a full one"
                )


class PartEncoder:
    """This rank's part of every version, and the 16-bit copies that it keeps on the host.

    One copy is the reference of the next version. A second one is made for versions written beside
    the training, and reused for later ones.

    Attributes:
        shards: the shards that this rank publishes.
        raw: whether changes are sent without a codec.
    """

    def __init__(self, weights: DividedWeights, bucket: int = BUCKET) -> None:
        self.bucket = bucket
        self.raw = False
        self.shards = [Shard(one, weights.table[one.stretch.name][1]) for one in weights.owned]
        # as large as the largest piece, once one is written
        self._room = torch.empty(0, dtype=torch.uint8)
        self._event: torch.cuda.Event | None = None  # recorded after the copies from a device

    @torch.no_grad()
    def begin_snapshot(self) -> None:
        """Start to copy the present weights for a version written in the background.

        Weights on the host may change only once ``end_snapshot`` has returned.
        """
        places = [shard.begin_snapshot(self.bucket) for shard in self.shards]
        self._event = None
        for place in places:
            if place.type == "cuda":
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._event.record(torch.cuda.current_stream(place))
                break

    @torch.no_grad()
    def end_snapshot(self) -> None:
        """Copy the rest; raise PublishError if weights on the host have changed meanwhile."""
        if self._event is not None:
            self._event.synchronize()
        for shard in self.shards:
            shard.end_snapshot(self.bucket)
        for shard in self.shards:
            shard.check_snapshot(self.bucket)

    @torch.no_grad()
    def write(
        self, sink: Sink, head: dict[str, object], rank: int, full: bool, beside: bool = False
    ) -> PartSummary:
        """Write this rank's part of the version that ``head`` names; its values become the
        reference.

        1 compare a piece with the reference
        2 encode it, and copy it over the reference
        3 write it to ``sink``

        ``full``: encode without reference. ``beside``: encode the snapshot, which becomes the
        reference. After an error the references belong to no version.
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
            assert full or shard.reference is not None, "only a full version needs no reference"
            if shard.reference is None and not beside:
                shard.reference = torch.empty(shard.stretch.numel, dtype=shard.dtype)
            digests: list[str] = []
            for number, (low, high) in enumerate(shard.pieces(self.bucket)):
                before = "" if full else shard.digests[number]
                new = shard.snapshot[low:high] if beside and shard.snapshot is not None else None
                entry, payload = self._piece(shard, low, high, before, told, new)
                entries.append(entry)
                put(payload)  # 3
                digests.append(entry.after)
            shard.digests = digests
            if beside:
                shard.reference, shard.snapshot = shard.snapshot, shard.reference
                shard.make_room()
        rows = [entry.row() for entry in entries]
        end, told.digest = part_end(rank, {**head, "rank": rank, "pieces": rows})
        put(memoryview(end))
        told.wire_s = told.link_s
        return told

    def _piece(
        self,
        shard: Shard,
        low: int,
        high: int,
        before: str,
        told: PartSummary,
        new: Tensor | None = None,
    ) -> tuple[PieceEntry, memoryview]:
        """Encode values ``low`` to ``high`` of ``shard``; return the piece's entry and padded
        payload.

        ``new``: these values, if already copied; None: they are read and copied.
        """
        reference = None if shard.reference is None else shard.reference[low:high]
        # 1
        begun = time.perf_counter()
        values = shard.values(low, high) if new is None else new
        changed, after = values.numel(), ""
        if before:
            assert reference is not None
            changed, after = compare(values, reference)
        compared = time.perf_counter()
        # 2
        coding, nbytes, payload = SAME, 0, self._room[:0]
        if changed:
            before_it = reference if before else None
            coding, nbytes, payload = self._encode(values, before_it, shard.kind, told)
            if new is None and reference is not None:
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
        """Encode into the scratch buffer, or use raw values if these are no longer.

        Returns the coding, its number of bytes, and the bytes with zero padding.
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
        """Copy the current weights as reference; return the checksum of each piece."""
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
        """Free references and snapshots; the next version must then be a full one."""
        for shard in self.shards:
            shard.reference, shard.snapshot, shard.digests = None, None, []
