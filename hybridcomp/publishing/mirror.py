"""Hold a receiver's weights, and the checked changes of a version that wait to be applied."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridcomp.codecs import StepCode
from hybridcomp.codecs.changes import change_kernels
from hybridcomp.errors import CodecError, PublishError
from hybridcomp.escaping import one_line
from hybridcomp.publishing.checksums import XXH3, compare, digest_of, empty_mask
from hybridcomp.publishing.parts import BYTES, RAW, SAME, STEPS, PieceEntry, ReadPart
from hybridcomp.publishing.quantized import EIGHT, packed, unpacked
from hybridcomp.publishing.records import DamagedVersion, Manifest, need
from hybridcomp.publishing.weight_ranges import WeightRange
from hybridcomp.publishing.weights import PATTERNS, Table, uncovered

CODEC = StepCode()
#: a piece is kept whole if more than one in this many of its values changed: faster to copy
DENSE = 8


@dataclass
class Change:
    """New values of a piece (all values, or only the changed ones), and a mask of changes."""

    stretch: WeightRange
    values: Tensor
    mask: Tensor
    changed: int

    def apply(self, flat: Tensor) -> None:
        """Write the new values into the parameter's values ``flat``; free the new values."""
        target = self.stretch.of(flat)
        if len(self.values) == self.stretch.numel:
            target.copy_(self.values.view(target.shape))
        elif self.stretch.runs > 1:
            flat[self.offsets()] = self.values
        else:
            change_kernels().put(
                self.values.data_ptr(), self.mask.data_ptr(), target.numel(), target.data_ptr()
            )
        self.values = self.values[:0]

    def offsets(self) -> Tensor:
        """Return the flat offsets of the changed values in the parameter, as int64."""
        local = torch.empty(self.changed, dtype=torch.int64, device="cpu")
        change_kernels().places(self.mask.data_ptr(), self.stretch.numel, local.data_ptr())
        return self.stretch.offsets(local)


@dataclass
class CheckedVersion:
    """A version that was checked; it has not changed the mirror yet."""

    manifest: Manifest
    changes: list[Change] = field(default_factory=list)
    #: a new mirror, for a first version
    fresh: Mirror | None = None
    decode_s: float = 0.0


@dataclass
class Mirror:
    """All weights of one version on the host, flat, by name."""

    table: Table
    aliases: dict[str, str]
    flats: dict[str, Tensor]
    #: ranges known to cover all values
    cover: list[WeightRange] = field(default_factory=list)

    @classmethod
    def empty(cls, table: Table, aliases: dict[str, str]) -> Mirror:
        """Allocate the weights of ``table``, all NaN. Raises PublishError if memory is short."""
        counts = {name: math.prod(shape) for name, (shape, _) in table.items()}
        try:
            flats = {
                name: torch.full((count,), math.nan, dtype=PATTERNS[table[name][1]], device="cpu")
                for name, count in counts.items()
            }
        except (MemoryError, OverflowError, RuntimeError):  # torch's errors for missing memory
            raise _no_memory(table) from None
        return cls(table, aliases, flats)

    def shaped(self, name: str) -> Tensor:
        """Return a parameter in its shape: a view, or the decoded patterns if it is quantized."""
        shape, kind = self.table[name]
        return unpacked(self.flats[name].view(shape), kind)


def stage(manifest: Manifest, parts: Sequence[ReadPart], mirror: Mirror | None) -> CheckedVersion:
    """Check and decode all pieces of a version, without changing ``mirror``.

    Raises PublishError if pieces are missing or duplicated, and DamagedVersion if mirror values
    differ from the sender's reference, or if payloads or decoded values have a wrong checksum.
    """
    table = manifest.table if mirror is None else mirror.table
    assert table is not None, "the first version is a full one"
    stretches = [one.stretch for part in parts for one in part.pieces]
    if mirror is None or mirror.cover != stretches:
        _check_cover(manifest, table, stretches)
    target = mirror or Mirror.empty(table, manifest.aliases)
    target.cover = stretches
    fresh = target if mirror is None else None
    staged = CheckedVersion(manifest, fresh=fresh)
    room: Tensor | None = None  # for values that are not kept
    for part in parts:
        for piece in part.pieces:
            flat = target.flats[piece.stretch.name]
            view = piece.stretch.of(flat)
            held = view.reshape(-1)
            _check_before(manifest, piece, held)
            if piece.coding == SAME:
                continue
            if room is None or room.numel() < held.numel() or room.dtype != held.dtype:
                room = torch.empty_like(held)
            begun = time.perf_counter()
            kind = table[piece.stretch.name][1]
            values = _decode(manifest, part, piece, kind, held, room[: held.numel()])
            staged.decode_s += time.perf_counter() - begun
            if mirror is None:
                _check_after(manifest, piece, digest_of(values, manifest.checksum))
                view.copy_(values.view(view.shape))
            else:
                change = _change(manifest, piece, values, held)
                staged.changes += [] if change is None else [change]
                if change is not None and change.values.data_ptr() == room.data_ptr():
                    room = None
    return staged


def _no_memory(table: Table) -> PublishError:
    nbytes = 2 * sum(math.prod(shape) for shape, _ in table.values())
    return PublishError(
        f"this receiver has no memory for {nbytes} bytes of weights; give its host more, or have "
        "it receive another model"
    )


def _check_cover(manifest: Manifest, table: Table, stretches: Sequence[WeightRange]) -> None:
    """Raise PublishError unless the pieces cover every value of the table exactly once."""
    try:
        wrong = uncovered(table, stretches)
    except (MemoryError, OverflowError, RuntimeError):
        raise _no_memory(table) from None
    if not wrong:
        return
    name, want, found = wrong[0]
    what = "values beyond its end or twice" if found < 0 else f"{found} values"
    raise PublishError(
        f"version {manifest.version}: {one_line(name)}: expected {want} values, found {what}; "
        "a parameter more, less or of another size: start a new chain in an empty folder"
    )


def _check_before(manifest: Manifest, piece: PieceEntry, held: Tensor) -> None:
    """Raise DamagedVersion if mirror values are not those that the sender compared with."""
    if not manifest.full and digest_of(held, manifest.checksum) != piece.before:
        raise DamagedVersion(
            f"version {manifest.version}: {one_line(piece.stretch.name)}: the receiver's values "
            f"are not those of version {manifest.parent}: somebody has written to the mirror, "
            "whose tensors are for reading"
        )


def _check_after(manifest: Manifest, piece: PieceEntry, found: str) -> None:
    """Raise DamagedVersion if decoded values have another checksum than the sender's."""
    if found != piece.after:
        where = f"version {manifest.version}: {one_line(piece.stretch.name)}"
        raise DamagedVersion(
            f"{where}: expected checksum {piece.after}, found another; copy it again"
        )


def _decode(
    manifest: Manifest, part: ReadPart, piece: PieceEntry, kind: str, held: Tensor, room: Tensor
) -> Tensor:
    """Read a payload and decode it into ``room``; raw values are returned as read."""
    try:
        payload = part.payload(piece)
        if piece.coding == RAW:
            need(payload.numel() == held.nbytes, "the size of raw values")
            return payload.view(held.dtype)
        if piece.coding == BYTES:
            need(payload.numel() == held.numel() and kind in EIGHT, "the size of values")
            return packed(payload, kind)
        CODEC.decode(payload, held if piece.coding == STEPS else None, room)
        return room
    except (CodecError, OSError, RuntimeError, ValueError) as error:
        where = f"version {manifest.version}: {one_line(piece.stretch.name)}"
        raise DamagedVersion(f"{where}: {one_line(error)}; copy it again: {part.name}") from None


def _change(manifest: Manifest, piece: PieceEntry, values: Tensor, held: Tensor) -> Change | None:
    """Check decoded values; return the change from the mirror, None if no value differs.

    If many values differ, the change holds ``values`` itself.
    """
    mask = empty_mask(values.numel())
    changed, digest = compare(values, held, mask)
    if manifest.checksum != XXH3:
        digest = digest_of(values, manifest.checksum)
    _check_after(manifest, piece, digest)
    if not changed:
        return None
    if changed * DENSE > values.numel():
        return Change(piece.stretch, values, mask, changed)
    picked = torch.empty(changed, dtype=values.dtype, device="cpu")
    change_kernels().pick(values.data_ptr(), mask.data_ptr(), values.numel(), picked.data_ptr())
    return Change(piece.stretch, picked, mask, changed)
