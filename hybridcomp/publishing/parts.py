"""Format of a part: the payloads of one rank, and an index of their pieces.

A part: 16 bytes of head (``PART``, rank, zeros), payloads at multiples of 16 bytes, an index as
JSON, 32 bytes of tail (number of bytes of the index, a checksum, ``TAIL``). The index has an entry
for each piece of a parameter: position, coding, number of bytes, number of changed values, and
checksums of the old values, the new values and the payload. The part's checksum covers its head and
index; each payload is checked once, when it is read.

In format 1 the part's checksum covers the whole file, which is read first.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from hybridcomp.escaping import one_line, parsed_json
from hybridcomp.publishing.checksums import BLAKE2B, XXH3, bytes_of, digest_of
from hybridcomp.publishing.part_buffers import ALIGN, PartBytes
from hybridcomp.publishing.records import (
    MOST_MANIFEST,
    DamagedVersion,
    Manifest,
    PartEntry,
    is_count,
    is_hex,
    need,
)
from hybridcomp.publishing.weight_ranges import WeightRange

PART, TAIL = b"hcpart\x01\x00", b"hcpend\x01\x00"
HEAD_NBYTES, TAIL_NBYTES = 16, 32
#: codings of a piece: steps from the previous version, encoded alone, raw, unchanged (no payload),
#: raw 8-bit values
STEPS, ALONE, RAW, SAME, BYTES = "stepcode", "alone", "raw", "same", "bytes"
#: number of bytes of a format 1 file that are read at once
CHUNK = 1 << 22


@dataclass(frozen=True)
class PieceEntry:
    """One piece of a parameter in a part.

    Attributes:
        stretch: range of the piece's values in the parameter.
        coding: one of STEPS, ALONE, RAW, SAME, BYTES.
        offset, nbytes: position and size of the payload in the part.
        changed: number of values that differ from the previous version.
        before: checksum of the piece's values in the parent version; "" without a parent.
        after: checksum of the piece's values in this version.
        payload: checksum of the payload with its padding; "" without a payload, and in format 1.
    """

    stretch: WeightRange
    coding: str
    offset: int
    nbytes: int
    changed: int
    before: str
    after: str
    payload: str = ""

    def row(self) -> list[Any]:
        """Return the entry as it is written in the index."""
        where, *rest = astuple(self)
        return [*where, *rest]


def part_head(rank: int) -> bytes:
    """Return the first bytes of a part."""
    return PART + struct.pack("<II", rank, 0)


def part_end(rank: int, index: Mapping[str, Any]) -> tuple[bytes, str]:
    """Return the index and the tail of a part, and the part's checksum."""
    text = json.dumps(index).encode()
    digest = _index_digest(rank, text)
    return text + struct.pack("<Q", len(text)) + bytes.fromhex(digest) + TAIL, digest


def _index_digest(rank: int, text: bytes) -> str:
    return digest_of(torch.frombuffer(bytearray(part_head(rank) + text), dtype=torch.uint8))


@dataclass(frozen=True)
class ReadPart:
    """A part with a checked index: its bytes, its name and its pieces."""

    data: PartBytes
    name: str
    pieces: list[PieceEntry]

    def payload(self, piece: PieceEntry) -> Tensor:
        """Read the payload of a piece, as uint8. Raises ValueError if it is damaged."""
        room = self.data.at(piece.offset, -(-piece.nbytes // ALIGN) * ALIGN)
        # the payload of raw values is the values themselves, whose checksum is verified later
        is_looked_at = piece.coding == RAW and piece.payload == piece.after
        if piece.payload and not is_looked_at and digest_of(room) != piece.payload:
            raise ValueError(f"another checksum of its payload in {self.name}")
        return room[: piece.nbytes]


def read_part(data: PartBytes, entry: PartEntry, manifest: Manifest) -> ReadPart:
    """Check size, head and index of a part of ``manifest``. Raises DamagedVersion."""
    where = f"version {manifest.version}: {entry.file}"
    try:
        size = data.size()
        if size != entry.nbytes:
            raise DamagedVersion(
                f"{where}: expected {entry.nbytes} bytes, found {size}: it is half-written; copy "
                "it again, or wait until it is there"
            )
        end, text = _index_of(data, entry, manifest.checksum)
        index = parsed_json(text.decode())
        mine = (manifest.base, manifest.version, manifest.parent, entry.rank)
        found = tuple(index[key] for key in ("base", "version", "parent", "rank"))
        need(found == mine, "its version")
        return ReadPart(data, entry.file, [_piece(row, end, manifest) for row in index["pieces"]])
    except (KeyError, OSError, TypeError, ValueError, struct.error) as error:
        raise DamagedVersion(
            f"{where}: expected a part of this version, found {one_line(error)}; copy it again "
            "from the sender"
        ) from None


def summary_of(data: PartBytes, rank: int) -> dict[str, Any]:
    """Return the manifest entry of a complete part: ``nbytes``, ``changed`` and ``digest``.

    Raises ValueError or similar if it is incomplete.
    """
    size = data.size()
    need(size >= HEAD_NBYTES + TAIL_NBYTES, "its size")
    digest = bytes(bytes_of(data.at(size - TAIL_NBYTES + 8, 16))).hex()
    _, text = _index_of(data, PartEntry(rank, "", size, digest), XXH3)
    pieces = parsed_json(text.decode())["pieces"]
    return {"nbytes": size, "changed": sum(row[8] for row in pieces), "digest": digest}


def _index_of(data: PartBytes, entry: PartEntry, checksum: str) -> tuple[int, bytes]:
    """Return the position and the checked text of a part's index."""
    if checksum == BLAKE2B:
        _check_whole(data, entry)
    need(entry.nbytes >= HEAD_NBYTES + TAIL_NBYTES, "its size")
    head = bytes(bytes_of(data.at(0, HEAD_NBYTES)))
    tail = bytes(bytes_of(data.at(entry.nbytes - TAIL_NBYTES, TAIL_NBYTES)))
    (nbytes,) = struct.unpack("<Q", tail[:8])
    end = entry.nbytes - TAIL_NBYTES - nbytes
    right = head == part_head(entry.rank) and tail[24:] == TAIL and end >= HEAD_NBYTES
    need(right and nbytes <= MOST_MANIFEST, "its checksum is wrong: head or tail")
    text = bytes(bytes_of(data.at(end, nbytes)))
    if checksum == BLAKE2B:
        found = hashlib.blake2b(text, digest_size=16).hexdigest()
    else:
        found = _index_digest(entry.rank, text)
        need(found == entry.digest, "its checksum")
    need(found == tail[8:24].hex(), "the index's checksum")
    return end, text


def _check_whole(data: PartBytes, entry: PartEntry) -> None:
    """Verify the checksum of a format 1 part. Raises ValueError."""
    found = hashlib.blake2b(digest_size=32)
    for low in range(0, entry.nbytes, CHUNK):
        found.update(bytes_of(data.at(low, min(CHUNK, entry.nbytes - low))))
    if found.hexdigest() != entry.digest:
        raise ValueError(f"checksum {found.hexdigest()[:12]}... for {entry.digest[:12]}...")


def _piece(row: list[Any], end: int, manifest: Manifest) -> PieceEntry:
    if manifest.checksum == BLAKE2B:
        row = [*row, ""]
    name, start, length, runs, stride, coding, offset, nbytes, changed, before, after, payload = row
    numbers = (start, length, runs, stride, offset, nbytes, changed)
    need(isinstance(name, str) and all(map(is_count, numbers)) and runs > 0, "a piece")
    need(runs == 1 or stride >= length, "a piece's rows")
    codings = (ALONE, RAW, BYTES) if manifest.full else (STEPS, RAW, SAME, BYTES)
    padded = -(-nbytes // ALIGN) * ALIGN
    need(coding in codings and offset >= HEAD_NBYTES and offset + padded <= end, "a payload")
    need(is_hex(after) and (manifest.full or is_hex(before)), "a checksum")
    need(is_hex(payload) or not nbytes or manifest.checksum == BLAKE2B, "a payload's checksum")
    stretch = WeightRange(name, start, length, runs, stride)
    need(stretch.numel >= changed and stretch.numel > 0, "a number of values")
    return PieceEntry(stretch, coding, offset, nbytes, changed, before, after, payload)
