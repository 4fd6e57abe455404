"""Write and read a version's manifest: JSON that lists its parts and its parent version.

It has the chain (``base``), the version, its reference version (``parent``, with the checksum of
the parent's manifest), the parts with sizes and checksums, and in a full version the table of all
parameters.
Nothing in it is executed; everything is checked before use.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hybridcomp.errors import PublishError
from hybridcomp.escaping import one_line, parsed_json
from hybridcomp.publishing.checksums import BLAKE2B, XXH3
from hybridcomp.publishing.weights import FP32, PATTERNS, Table

FORMAT = "hybridcomp_weights"
#: readable format versions, by the checksum of their values; the last one is written
FORMAT_VERSIONS = {BLAKE2B: 1, XXH3: 2}
#: most bytes of a manifest, and of the index of a part
MOST_MANIFEST = 1 << 30
_HEX = re.compile(r"[0-9a-f]{32}|[0-9a-f]{64}")


class DamagedVersion(PublishError):
    """Error of a version that cannot be applied; a later full version lets the receiver go on."""


@dataclass(frozen=True)
class PartEntry:
    """A part as listed in the manifest."""

    rank: int
    file: str
    nbytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """Description of one version; ``digest`` covers all other fields."""

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
    checksum: str = XXH3

    @property
    def full(self) -> bool:
        """Return whether the version can be applied without an earlier one."""
        return self.parent is None

    @property
    def nbytes(self) -> int:
        """Return the bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    @property
    def digest(self) -> str:
        """Return the checksum that the next version refers to."""
        return _digest(self._fields())

    def _fields(self) -> dict[str, Any]:
        own = asdict(self)
        if self.checksum == BLAKE2B:  # format 1 had only this checksum, and did not name it
            del own["checksum"]
        return {"format": FORMAT, "format_version": FORMAT_VERSIONS[self.checksum], **own}

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
    """Parse and check a manifest. ``where``: its name in messages. Raises DamagedVersion."""
    try:
        found = parsed_json(text.decode())
        stated = found.pop("digest")
        checksum = found.get("checksum", BLAKE2B)
        if (found["format"], found["format_version"]) != (FORMAT, FORMAT_VERSIONS[checksum]):
            raise ValueError(f"it has format {found['format']!r} {found['format_version']!r}")
        if _digest(found) != stated:
            raise ValueError("its checksum is wrong")
        return _manifest(found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedVersion(
            f"{where}: expected a manifest of this format, found another or a damaged "
            f"one ({one_line(error)}); copy it again from the sender"
        ) from None


def _manifest(found: dict[str, Any]) -> Manifest:
    """Build a manifest from parsed JSON; raise ValueError or similar if anything is wrong."""
    parts = [PartEntry(**part) for part in found["parts"]]
    for part in parts:
        need(is_count(part.rank) and is_count(part.nbytes) and is_hex(part.digest), "parts")
        need(re.fullmatch(r"[A-Za-z0-9_.]{1,100}", part.file) is not None, "the name of a part")
    table = None
    if found["table"] is not None:
        table = {str(name): _entry(*entry) for name, entry in found["table"].items()}
    counts = [found[key] for key in ("version", "weights", "changed", "step")]
    counts += [] if found["parent"] is None else [found["parent"]]
    need(all(map(is_count, counts)) and found["version"] > 0, "a count")
    need((found["parent"] is None) == (table is not None), "a table, or none")
    need(all(is_hex(found[key]) for key in ("base", "table_digest")), "a checksum")
    need(isinstance(found["parent_digest"], str), "the parent's checksum")
    aliases = {str(name): str(of) for name, of in found["aliases"].items()}
    return Manifest(
        found["base"], found["version"], found["parent"], found["parent_digest"],
        found["table_digest"], found["weights"], found["changed"], found["step"], parts, table,
        aliases, found.get("checksum", BLAKE2B),
    )  # fmt: skip


def _entry(shape: list[int], dtype: str) -> tuple[tuple[int, ...], str]:
    need(all(map(is_count, shape)) and dtype in PATTERNS, "the table")
    need(dtype != FP32 or shape[-1:] == [2], "a table of fp32 values")
    return tuple(shape), dtype


def need(right: bool, what: str) -> None:
    """Raise ValueError about ``what`` unless ``right``."""
    if not right:
        raise ValueError(f"{what} cannot be right")


def is_count(value: object) -> bool:
    """Return whether a parsed value is an integer from 0 to 2**62 - 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def is_hex(value: object) -> bool:
    """Return whether a parsed value is a checksum: 32 or 64 hexadecimal digits."""
    return isinstance(value, str) and _HEX.fullmatch(value) is not None
