"""The format of a version: parts with payloads, one of each rank, and a manifest over them.

A part: 16 bytes of head (``PART``, rank, zeros), payloads at multiples of 16 bytes, an index as
JSON, 32 bytes of tail (bytes of the index, its checksum, ``TAIL``). The index has an entry for
each piece of a parameter: where it is, how it is encoded, how many bytes, how many values changed,
and the checksums of its values before and after.

A manifest is JSON: the chain (``base``), the version and the one it is made against (``parent``
with the checksum of that manifest), the parts with sizes and checksums, and in a full version the
table of all parameters. Checksums are BLAKE2b. Nothing in either is executed; everything is
checked before use.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO

import torch
from torch import Tensor

from hybridcomp.errors import PublishError
from hybridcomp.foreign import one_line, parsed_json
from hybridcomp.publishing.stretches import WeightRange
from hybridcomp.publishing.weights import DTYPES, Table

FORMAT, FORMAT_VERSION = "hybridcomp_weights", 1
PART, TAIL = b"hcpart\x01\x00", b"hcpend\x01\x00"
HEAD_NBYTES, TAIL_NBYTES, ALIGN = 16, 32, 16
#: how a piece is encoded: steps from the version before, alone, as it is, not at all (no change)
STEPS, ALONE, RAW, SAME = "stepcode", "alone", "raw", "same"
#: bytes that are read at once
CHUNK = 1 << 22
ASK = "ask for a full version: Publisher.ask_full() on the sender, or a new WeightReceiver"
_HEX = re.compile(r"[0-9a-f]{32}|[0-9a-f]{64}")


@dataclass(frozen=True)
class PieceEntry:
    """One piece of a parameter in a part.

    Attributes:
        stretch: where its values are in the parameter.
        coding: one of STEPS, ALONE, RAW, SAME.
        offset, nbytes: where its payload is in the part.
        changed: number of values that differ from the version before.
        before, after: checksums of the values of the parent and of this version; "" without one.
    """

    stretch: WeightRange
    coding: str
    offset: int
    nbytes: int
    changed: int
    before: str
    after: str

    def row(self) -> list[Any]:
        """Return the form in the index."""
        one = self.stretch
        where = [one.name, one.start, one.length, one.runs, one.stride]
        return [
            *where,
            self.coding,
            self.offset,
            self.nbytes,
            self.changed,
            self.before,
            self.after,
        ]


@dataclass(frozen=True)
class PartEntry:
    """A part as the manifest names it."""

    rank: int
    file: str
    nbytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """Description of one version; ``digest`` is that of all other fields."""

    base: str
    version: int
    parent: int | None
    parent_digest: str
    table_digest: str
    weights: int
    changed: int
    step: int
    parts: list[PartEntry]
    table: Table | None = None
    aliases: dict[str, str] = field(default_factory=dict)

    @property
    def full(self) -> bool:
        """Return whether the version needs no version before it."""
        return self.parent is None

    @property
    def nbytes(self) -> int:
        """Return the bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    @property
    def digest(self) -> str:
        """Return the checksum that the next version names."""
        return _digest(self._fields())

    def _fields(self) -> dict[str, Any]:
        return {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}

    def to_json(self) -> bytes:
        """Return the bytes of the manifest."""
        return json.dumps({**self._fields(), "digest": self.digest}).encode() + b"\n"


def _digest(fields: Mapping[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def table_digest(table: Table, aliases: Mapping[str, str]) -> str:
    """Return the checksum of names, shapes, dtypes and aliases."""
    rows = {name: [list(shape), dtype] for name, (shape, dtype) in table.items()}
    return _digest({"table": rows, "aliases": dict(aliases)})


def read_manifest(text: bytes, where: str) -> Manifest:
    """Parse and check a manifest. ``where``: its file, for messages. Raises PublishError."""
    try:
        found = parsed_json(text.decode())
        stated = found.pop("digest")
        if (found["format"], found["format_version"]) != (FORMAT, FORMAT_VERSION):
            raise ValueError(f"it has format {found['format']!r} {found['format_version']!r}")
        if _digest(found) != stated:
            raise ValueError("its checksum is wrong")
        return _manifest(found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PublishError(
            f"{one_line(where)}: expected a manifest of this format, found another or a damaged "
            f"one ({one_line(error)}); copy it again from the sender"
        ) from None


def _manifest(found: dict[str, Any]) -> Manifest:
    """Make a manifest of parsed JSON; raises ValueError and its kin where anything is odd."""
    parts = [PartEntry(**part) for part in found["parts"]]
    for part in parts:
        _need(_is_count(part.rank) and _is_count(part.nbytes) and _is_hex(part.digest), "parts")
        _need(re.fullmatch(r"[A-Za-z0-9_.]{1,100}", part.file) is not None, "the name of a part")
    table = None
    if found["table"] is not None:
        table = {str(name): _entry(*entry) for name, entry in found["table"].items()}
    counts = [found[key] for key in ("version", "weights", "changed", "step")]
    counts += [] if found["parent"] is None else [found["parent"]]
    _need(all(map(_is_count, counts)) and found["version"] > 0, "a count")
    _need((found["parent"] is None) == (table is not None), "a table, or none")
    _need(all(_is_hex(found[key]) for key in ("base", "table_digest")), "a checksum")
    _need(isinstance(found["parent_digest"], str), "the parent's checksum")
    aliases = {str(name): str(of) for name, of in found["aliases"].items()}
    return Manifest(
        found["base"], found["version"], found["parent"], found["parent_digest"],
        found["table_digest"], found["weights"], found["changed"], found["step"], parts, table,
        aliases,
    )  # fmt: skip


def _entry(shape: list[int], dtype: str) -> tuple[tuple[int, ...], str]:
    _need(all(map(_is_count, shape)) and dtype in DTYPES, "the table")
    return tuple(shape), dtype


def _need(right: bool, what: str) -> None:
    if not right:
        raise ValueError(f"{what} cannot be right")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def _is_hex(value: object) -> bool:
    return isinstance(value, str) and _HEX.fullmatch(value) is not None


def part_head(rank: int) -> bytes:
    """Return the first bytes of a part."""
    return PART + struct.pack("<II", rank, 0)


def part_end(index: Mapping[str, Any]) -> bytes:
    """Return the index and the tail of a part."""
    text = json.dumps(index).encode()
    digest = hashlib.blake2b(text, digest_size=16).digest()
    return text + struct.pack("<Q", len(text)) + digest + TAIL


@dataclass(frozen=True)
class ReadPart:
    """A part that was checked as a whole: its file, and its pieces."""

    file: BinaryIO
    pieces: list[PieceEntry]

    def payload(self, piece: PieceEntry) -> Tensor:
        """Read the payload of a piece, as uint8."""
        self.file.seek(piece.offset)
        return torch.frombuffer(bytearray(self.file.read(piece.nbytes)), dtype=torch.uint8)


def read_part(file: BinaryIO, entry: PartEntry, manifest: Manifest) -> ReadPart:
    """Check size, checksum, head and index of a part of ``manifest``. Raises PublishError."""
    where = f"version {manifest.version}: {entry.file}"
    size = file.seek(0, 2)
    if size != entry.nbytes:
        raise PublishError(
            f"{where}: expected {entry.nbytes} bytes, found {size}: it is half-written; copy it "
            "again, or wait until it is there"
        )
    file.seek(0)
    found = hashlib.blake2b(digest_size=32)
    while chunk := file.read(CHUNK):
        found.update(chunk)
    if found.hexdigest() != entry.digest:
        raise PublishError(
            f"{where}: expected checksum {entry.digest[:12]}..., found {found.hexdigest()[:12]}...;"
            " copy it again from the sender"
        )
    try:
        return ReadPart(file, _index(file, entry, manifest))
    except (KeyError, TypeError, ValueError, struct.error) as error:
        raise PublishError(
            f"{where}: expected a part of this version, found {one_line(error)}; copy it again "
            "from the sender"
        ) from None


def _index(file: BinaryIO, entry: PartEntry, manifest: Manifest) -> list[PieceEntry]:
    """Read and check the index of a part."""
    file.seek(0)
    _need(file.read(HEAD_NBYTES) == part_head(entry.rank), "the head")
    file.seek(entry.nbytes - TAIL_NBYTES)
    tail = file.read(TAIL_NBYTES)
    (nbytes,) = struct.unpack("<Q", tail[:8])
    end = entry.nbytes - TAIL_NBYTES - nbytes
    _need(tail[24:] == TAIL and end >= HEAD_NBYTES, "the tail")
    file.seek(end)
    text = file.read(nbytes)
    _need(hashlib.blake2b(text, digest_size=16).digest() == tail[8:24], "the index's checksum")
    index = parsed_json(text.decode())
    mine = (manifest.base, manifest.version, manifest.parent, entry.rank)
    _need(tuple(index[key] for key in ("base", "version", "parent", "rank")) == mine, "its version")
    return [_piece(row, end, manifest) for row in index["pieces"]]


def _piece(row: list[Any], end: int, manifest: Manifest) -> PieceEntry:
    name, start, length, runs, stride, coding, offset, nbytes, changed, before, after = row
    numbers = (start, length, runs, stride, offset, nbytes, changed)
    _need(isinstance(name, str) and all(map(_is_count, numbers)) and runs > 0, "a piece")
    _need(runs == 1 or stride >= length, "a piece's rows")
    codings = (ALONE, RAW) if manifest.full else (STEPS, RAW, SAME)
    _need(coding in codings and offset >= HEAD_NBYTES and offset + nbytes <= end, "a payload")
    _need(_is_hex(after) and (manifest.full or _is_hex(before)), "a checksum")
    stretch = WeightRange(name, start, length, runs, stride)
    _need(stretch.numel >= changed and stretch.numel > 0, "a number of values")
    return PieceEntry(stretch, coding, offset, nbytes, changed, before, after)
