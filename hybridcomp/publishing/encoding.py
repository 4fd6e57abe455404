"""Compare this rank's weights with the last version, and encode what changed, piece by piece."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from hybridcomp.codecs import StepCode
from hybridcomp.job import saved
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
from hybridcomp.publishing.shards import Shard
from hybridcomp.publishing.weight_ranges import WeightRange
from hybridcomp.publishing.weights import DividedWeights

#: most values that are encoded at once
BUCKET = 1 << 23
#: pieces of fewer values are sent raw: the codec's model of the steps would be larger
LEAST = 512
CODEC = StepCode()


class Sink(Protocol):
    """Receives the bytes of one part."""

    def write(self, data: memoryview, /) -> object:
        """Accept bytes, which may be overwritten after the call."""


@dataclass
class PartSummary:
    """Seconds and bytes of writing a part, and the part's digest."""

    nbytes: int = 0
    changed: int = 0
    compare_s: float = 0.0
    encode_s: float = 0.0
    wire_s: float = 0.0
    codec_s: float = 0.0  # part of encode_s spent in the codec
    link_s: float = 0.0  # part of wire_s spent writing
    raw_nbytes: int = 0  # raw bytes of the pieces that changed
    digest: str = ""


class PartEncoder:
    """Encode this rank's part of every version, from 16-bit copies of its weights on the host.

    One copy is the reference of the next version. The first version that is written in the
    background adds a second copy, the snapshot, which later such versions reuse.

    Attributes:
        shards: the shards that this rank publishes.
        raw: whether changes are sent without a codec.
    """

    def __init__(self, weights: DividedWeights, bucket: int = BUCKET) -> None:
        self.bucket = bucket
        self.raw = False
        self.shards = [Shard(one, weights.table[one.stretch.name][1]) for one in weights.owned]
        # as large as the largest piece, once one is written
        self._room = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._event: torch.cuda.Event | None = None  # recorded after the copies from a device
        self._maker: threading.Thread | None = None  # makes room for the first snapshot
        self._is_due = False  # whether to stop making room: the snapshot begins or is not needed

    def make_room(self) -> None:
        """Start a thread that allocates the first snapshot; ``begin_snapshot`` waits for it."""
        if self._maker is None and not self._is_due:
            # an error, such as missing memory, is raised when the snapshot meets it again
            work, name = partial(saved.attempt, self._make_room), "hybridcomp memory for versions"
            self._maker = threading.Thread(target=work, name=name, daemon=True)
            self._maker.start()

    def _make_room(self) -> None:
        for shard in self.shards:
            shard.is_on_host = shard.owned.held.read().device.type == "cpu"
            if not self._is_due:
                shard.make_room(lambda: self._is_due)

    def _end_room(self) -> None:
        self._is_due = True
        if self._maker is not None:
            self._maker.join()
            self._maker = None

    @torch.no_grad()
    def begin_snapshot(self) -> None:
        """Start to copy the present weights for a version written in the background.

        Weights on the host may change only once ``end_snapshot`` has returned.
        """
        self._end_room()
        places = [shard.begin_snapshot(self.bucket) for shard in self.shards]
        self._event = None
        for place in places:
            if place.type == "cuda":
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._event.record(torch.cuda.current_stream(place))
                break

    @torch.no_grad()
    def end_snapshot(self) -> None:
        """Copy the weights on the host; raise PublishError if any has changed meanwhile."""
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
        """Write this rank's part of the version that ``head`` names, and make its values the
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
            room = torch.empty(
                CODEC.wire_nbytes(largest, torch.bfloat16), dtype=torch.uint8, device="cpu"
            )
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
                shard.reference = torch.empty(shard.stretch.numel, dtype=shard.dtype, device="cpu")
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

        ``new``: the values, if already copied; None: read them, and copy them to the reference.
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
        """Encode into the scratch buffer, or use the raw values if encoding does not shorten them.

        Returns the coding, the number of bytes without padding, and the zero-padded bytes.
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
            reference = torch.empty(shard.stretch.numel, dtype=shard.dtype, device="cpu")
            shard.digests = []
            for low, high in shard.pieces(self.bucket):
                reference[low:high].copy_(shard.values(low, high))
                shard.digests.append(digest_of(reference[low:high]))
                found[shard.stretch.cut(low, high)] = shard.digests[-1]
            shard.reference = reference
        return found

    def forget(self) -> None:
        """Free references and snapshots; the next version must then be a full one."""
        self._end_room()
        for shard in self.shards:
            shard.reference, shard.snapshot, shard.digests = None, None, []
