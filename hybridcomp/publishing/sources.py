"""Offer versions to a receiver: the interface, and a folder that does."""

from __future__ import annotations

import contextlib
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hybridcomp.errors import PublishError
from hybridcomp.foreign import quoted_path
from hybridcomp.publishing.checksums import in_threads
from hybridcomp.publishing.destinations import PARTS, manifests_in, read_manifest_file
from hybridcomp.publishing.parts import ReadPart, read_part
from hybridcomp.publishing.records import DamagedVersion, Manifest
from hybridcomp.publishing.spools import FileBytes, PartBytes, open_file

#: what to do where nothing leads back to the sender
BY_HAND = "Publisher.ask_full() on the sender makes its next version a full one"


@dataclass
class Offer:
    """A version that is there: its manifest, and its parts."""

    manifest: Manifest
    data: Sequence[PartBytes]

    def parts(self) -> list[ReadPart]:
        """Check and return the parts."""
        found = zip(self.data, self.manifest.parts, strict=True)
        return in_threads(lambda one: read_part(one[0], one[1], self.manifest), found)


class Source(ABC):
    """Offers versions in the order in which they can be applied."""

    @abstractmethod
    def offers(self, held: Manifest | None, until: int | None = None) -> Iterator[Offer]:
        """Yield versions after ``held``; each is applied before the next is asked for.

        ``until``: the last version to yield; a stream yields its next one, whichever it is.
        """

    @abstractmethod
    def ask(self, held: Manifest | None) -> str:
        """Ask the sender for a full version after ``held``; returns what a message says of it."""

    def turns_to_full(self, held: Manifest | None, until: int | None) -> bool:
        """Return whether a full version is there with which to go on from ``held`` at once."""
        return False

    def applied(self, apply_s: float, decode_s: float) -> None:  # noqa: B027
        """Note that the last offer was applied, and the seconds of decoding and applying it."""


class FolderSource(Source):
    """A folder of ``destinations.Folder``, or a copy of one."""

    def __init__(self, path: Path) -> None:
        """Hold ``path``, which may not exist yet."""
        self.path = path
        self._wants_full = False  # since an offer could not be applied
        self._asked: Path | None = None  # the file that asks; the sender removes it with its answer

    def offers(self, held: Manifest | None, until: int | None = None) -> Iterator[Offer]:
        """Yield the versions that lead to the newest one, or to ``until``.

        Ends before a version whose parts are not all there. Raises PublishError where a link of
        the chain is missing and no full version comes after it.
        """
        while True:
            manifest = self._settled(held, until)
            if manifest is None:
                return
            with ExitStack() as stack:
                files = self._open(manifest, stack)
                if files is None and self._was_removed(manifest):
                    continue
                if files is None:
                    return
                yield Offer(manifest, [FileBytes(file) for file in files])
            held = manifest

    def _settled(self, held: Manifest | None, until: int | None) -> Manifest | None:
        """Return ``_next``; look again where versions are removed meanwhile (``publish.keep``)."""
        while True:
            before = manifests_in(self.path)
            try:
                return self._next(held, until)
            except FileNotFoundError as error:
                if manifests_in(self.path) == before:
                    todo = "copy the folder again from the sender"
                    at = quoted_path(error.filename)
                    raise DamagedVersion(f"{at} is not there; {todo}") from None

    def _next(self, held: Manifest | None, until: int | None) -> Manifest | None:
        """Return the version to apply after ``held``; None where there is none."""
        newer = self._newer(held, until)
        if not newer:
            self._check_newest(held, until)
            return None
        if self._wants_full and (full := _newest_full(newer)) is not None:
            return full
        if held is not None and held.version + 1 in newer:
            found = read_manifest_file(newer[held.version + 1], held.version + 1)
            if found.full or (found.parent, found.parent_digest) == (held.version, held.digest):
                return found
            if found.base != held.base:
                return found  # the receiver says what is wrong with it
        return self._full(newer, held)

    def _newer(self, held: Manifest | None, until: int | None) -> dict[int, Path]:
        """Return the manifests after ``held`` up to ``until``."""
        low = 0 if held is None else held.version
        paths = manifests_in(self.path).items()
        return {v: path for v, path in paths if v > low and (until is None or v <= until)}

    def _check_newest(self, held: Manifest | None, until: int | None) -> None:
        """Raise PublishError where the folder's newest version is not the one that is held."""
        paths = self._newer(None, until)
        if held is None or not paths:
            return
        found = read_manifest_file(paths[max(paths)], max(paths))
        if found.base != held.base:
            what = (
                f"expected chain {held.base[:8]}, found {found.base[:8]}: another job writes here"
            )
        elif found.version < held.version:
            what = f"this receiver holds version {held.version}: a replay of an old folder"
        elif found.digest != held.digest:
            what = "its manifest is not the one that was applied"
        else:
            return
        todo = "copy the folder again, or make a new WeightReceiver to follow it"
        raise PublishError(f"version {found.version}: {what}; {todo}")

    def _full(self, newer: dict[int, Path], held: Manifest | None) -> Manifest:
        """Return the newest full version. Raises DamagedVersion where there is none."""
        if (found := _newest_full(newer)) is not None:
            return found
        at = 1 if held is None else held.version + 1
        if at not in newer:
            missing = f"version {at} is missing"
        else:
            read_manifest_file(newer[at], at)
            missing = f"version {at} does not follow the version {at - 1} of this receiver"
        raise DamagedVersion(
            f"{missing}, and no full version comes after it (newest: {max(newer)}); copy the "
            "folder again"
        )

    def turns_to_full(self, held: Manifest | None, until: int | None) -> bool:
        """Prefer full versions until one is applied; return whether there is an untried one."""
        if self._wants_full or held is None:
            return False
        self._wants_full = True
        return _newest_full(self._newer(held, until)) is not None

    def ask(self, held: Manifest | None) -> str:
        """Leave a file that asks for a full version.

        The sender removes the file when a full version is there, this receiver when it has applied
        another version meanwhile. In a copy of the folder the file has to be carried back.
        """
        if self._asked is None or not self._asked.exists():
            path = self.path / f"ask_full.{secrets.token_hex(4)}.json"
            try:
                with path.open("x") as file:
                    json.dump({"held": 0 if held is None else held.version}, file)
            except OSError as error:
                return f"no full version was asked for ({error.strerror}); {BY_HAND}"
            self._asked = path
        where = quoted_path(self.path)
        return f"a full version was asked for in {where}: update again when it is there"

    def applied(self, apply_s: float, decode_s: float) -> None:
        """Withdraw what was asked for: the receiver has a version to go on from."""
        self._wants_full = False
        if self._asked is not None:
            with contextlib.suppress(OSError):
                self._asked.unlink(missing_ok=True)
            self._asked = None

    def _open(self, manifest: Manifest, stack: ExitStack) -> list[BinaryIO] | None:
        """Open the parts; None where one is not there yet: copies come in any order."""
        files: list[BinaryIO] = []
        for part in manifest.parts:
            try:
                files.append(stack.enter_context(open_file(self.path / PARTS / part.file)))
            except FileNotFoundError:
                return None
            except OSError as error:
                raise PublishError(
                    f"version {manifest.version}: {part.file} cannot be read "
                    f"({error.strerror}); make it readable"
                ) from None
        return files

    def _was_removed(self, manifest: Manifest) -> bool:
        """Return whether the sender has deleted a version since it was read (``publish.keep``)."""
        return manifest.version not in manifests_in(self.path)


def _newest_full(newer: dict[int, Path]) -> Manifest | None:
    """Return the newest full version of ``newer``; damaged manifests are passed over."""
    for version, path in reversed(newer.items()):
        with contextlib.suppress(DamagedVersion):
            if (found := read_manifest_file(path, version)).full:
                return found
    return None
