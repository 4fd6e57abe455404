"""The receiver's weights, and the changes of a version that were checked and wait to be applied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridcomp.codecs import StepCode
from hybridcomp.errors import CodecError, PublishError
from hybridcomp.foreign import one_line
from hybridcomp.publishing.checksums import digest_of
from hybridcomp.publishing.records import (
    ASK,
    RAW,
    SAME,
    STEPS,
    Manifest,
    PieceEntry,
    ReadPart,
)
from hybridcomp.publishing.stretches import WeightRange
from hybridcomp.publishing.weights import DTYPES, Table, uncovered

CODEC = StepCode()
#: a change of more than one value in so many is kept as the whole piece with a mask: 3 bytes for
#: each value of it, where positions and values are 6 bytes for each that changed
DENSE = 2


@dataclass
class Change:
    """New values of a piece: those at ``positions``, or all of them with a mask of the changed."""

    stretch: WeightRange
    values: Tensor
    positions: Tensor | None
    mask: Tensor | None
    changed: int

    def apply(self, flat: Tensor) -> None:
        """Write the new values into all values of the parameter, and let go of them."""
        if self.positions is not None:
            flat[self.stretch.offsets(self.positions)] = self.values
        else:
            target = self.stretch.of(flat)
            target.copy_(self.values.view(target.shape))
        self.values = self.values[:0]

    def offsets(self) -> Tensor:
        """Return the flat offsets of the changed values in the parameter, as int64."""
        local = self.positions
        if local is None:
            assert self.mask is not None
            local = self.mask.nonzero().reshape(-1)
        return self.stretch.offsets(local)


@dataclass
class CheckedVersion:
    """A version that was checked: nothing of the mirror has changed yet."""

    manifest: Manifest
    changes: list[Change] = field(default_factory=list)
    #: a mirror of its own, of the first version
    fresh: Mirror | None = None


@dataclass
class Mirror:
    """All weights of one version on the host, flat, by name."""

    table: Table
    aliases: dict[str, str]
    flats: dict[str, Tensor]

    @classmethod
    def empty(cls, table: Table, aliases: dict[str, str]) -> Mirror:
        """Allocate the weights of ``table``."""
        flats = {
            name: torch.empty(torch.Size(shape).numel(), dtype=DTYPES[dtype])
            for name, (shape, dtype) in table.items()
        }
        return cls(table, aliases, flats)

    def shaped(self, name: str) -> Tensor:
        """Return a view of a parameter in its shape."""
        return self.flats[name].view(self.table[name][0])


def stage(manifest: Manifest, parts: Sequence[ReadPart], mirror: Mirror | None) -> CheckedVersion:
    """Check and decode all pieces of a version; changes nothing of ``mirror``.

    Raises PublishError where pieces are missing or double, a value of the mirror is not what the
    sender compared with, or decoded values have another checksum.
    """
    if mirror is None:
        assert manifest.full and manifest.table is not None
        fresh = Mirror.empty(manifest.table, manifest.aliases)
    target = fresh if mirror is None else mirror
    pieces = [one for part in parts for one in part.pieces]
    _check_cover(manifest, target.table, pieces)
    staged = CheckedVersion(manifest, fresh=fresh if mirror is None else None)
    for part in parts:
        for piece in part.pieces:
            flat = target.flats[piece.stretch.name]
            values = _decoded(manifest, part, piece, flat)
            if mirror is None:
                view = piece.stretch.of(flat)
                view.copy_(values.view(view.shape))
            elif values is not None and (change := _change(piece, values, flat)) is not None:
                staged.changes.append(change)
    return staged


def _check_cover(manifest: Manifest, table: Table, pieces: Iterable[PieceEntry]) -> None:
    """Raise PublishError unless the pieces are all values of the table, each once."""
    stretches = [one.stretch for one in pieces]
    wrong = uncovered(table, stretches)
    if not wrong and len(set(stretches)) == len(stretches):
        return
    name, want, found = wrong[0] if wrong else (stretches[0].name, 0, -1)
    what = "values beyond its end or twice" if found < 0 else f"{found} values"
    raise PublishError(
        f"version {manifest.version}: {one_line(name)}: expected {want} values, found {what}; "
        "a parameter more, less or of another size: start a new chain in an empty folder"
    )


def _decoded(manifest: Manifest, part: ReadPart, piece: PieceEntry, flat: Tensor) -> Tensor:
    """Return the new values of a piece, checked."""
    where = f"version {manifest.version}: {one_line(piece.stretch.name)}"
    held = piece.stretch.of(flat).reshape(-1)
    if not manifest.full and digest_of(held) != piece.before:
        raise PublishError(
            f"{where}: the receiver's values are not those of version {manifest.parent}: somebody "
            f"has written to the mirror, whose tensors are for reading; {ASK}"
        )
    if piece.coding == SAME:
        return held
    payload = part.payload(piece)
    values = torch.empty(piece.stretch.numel, dtype=flat.dtype)
    try:
        if piece.coding == RAW:
            values.view(torch.uint8).copy_(payload)
        else:
            CODEC.decode(payload, held if piece.coding == STEPS else None, values)
    except (CodecError, RuntimeError) as error:
        raise PublishError(f"{where}: {one_line(error)}; copy {part.file.name} again") from None
    if digest_of(values) != piece.after:
        raise PublishError(f"{where}: expected checksum {piece.after}, found another; {ASK}")
    return values


def _change(piece: PieceEntry, values: Tensor, flat: Tensor) -> Change | None:
    """Return what of a piece differs from the mirror, None where nothing does."""
    if piece.coding == SAME:
        return None
    held = piece.stretch.of(flat).reshape(-1)
    mask = values.view(torch.int16) != held.view(torch.int16)
    changed = int(torch.count_nonzero(mask))
    if not changed:
        return None
    if changed * DENSE > values.numel():
        return Change(piece.stretch, values, None, mask, changed)
    positions = mask.nonzero().reshape(-1)
    return Change(piece.stretch, values[positions], positions.to(torch.int32), None, changed)
