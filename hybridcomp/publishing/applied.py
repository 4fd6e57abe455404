"""Collect the changes that a receiver has applied since its last returned result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hybridcomp.publishing.mirror import Change, CheckedVersion
from hybridcomp.publishing.records import Manifest


@dataclass(frozen=True)
class AppliedVersion:
    """Result of ``WeightReceiver.update``: the versions applied since its last result.

    They include versions that an update applied before it raised an error.

    Attributes:
        version: the version that the mirror holds now.
        names: parameters with at least one changed value, in order.
        versions: how many versions were applied.
        full: whether one of them was a full version.
        changed: number of changed values; a value that changed twice counts twice.
        check_s, apply_s, seconds: seconds of checking and decoding, of writing the mirror, and of
            the whole call.
        since: ``version`` of the last result; 0: this is the first result.
    """

    version: int
    names: tuple[str, ...]
    versions: int
    full: bool
    changed: int
    check_s: float
    apply_s: float
    seconds: float
    since: int = 0


@dataclass
class AppliedChanges:
    """Changes of the mirror after version ``since``, and the seconds of applying these changes.

    Attributes:
        is_told: whether an update has returned these changes.
        is_new: whether a first version is included, so that all values of the mirror are new.
    """

    since: int = 0
    is_told: bool = False
    changes: dict[str, list[Change]] = field(default_factory=dict)
    is_new: bool = False
    count: int = 0
    full: bool = False
    check_s: float = 0.0
    apply_s: float = 0.0

    def note(self, staged: CheckedVersion) -> None:
        """Add a version that is about to be written into the mirror."""
        for change in staged.changes:
            self.changes.setdefault(change.stretch.name, []).append(change)
        self.is_new = self.is_new or staged.fresh is not None
        self.full = self.full or staged.manifest.full
        self.count += 1

    def result(self, held: Manifest, table: Mapping[str, object], seconds: float) -> AppliedVersion:
        """Return the changes as an update's result; ``held``, ``table``: the mirror's current
        state.
        """
        names = tuple(table) if self.is_new else tuple(sorted(self.changes))
        changed = held.weights if self.is_new else sum(
            change.changed for row in self.changes.values() for change in row
        )  # fmt: skip
        return AppliedVersion(
            held.version, names, self.count, self.full, changed, self.check_s, self.apply_s,
            seconds, self.since,
        )  # fmt: skip
