"""Offer versions to a receiver: the interface, and folders as a source."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hybridcomp.errors import PublishError
from hybridcomp.escaping import quoted_path
from hybridcomp.log import say
from hybridcomp.publishing.checksums import in_threads
from hybridcomp.publishing.destinations import PARTS, manifests_in, read_manifest_file
from hybridcomp.publishing.part_buffers import FileBytes, PartBytes, open_file
from hybridcomp.publishing.parts import ReadPart, read_part
from hybridcomp.publishing.records import DamagedVersion, Manifest

#: advice if there is no way to reach the sender
BY_HAND = "Publisher.ask_full() on the sender makes its next version a full one"
#: seconds after which a missing file is requested, with a line in the log
LOST_AFTER_S = 60.0


@dataclass
class Offer:
    """An available version: its manifest and its parts."""

    manifest: Manifest
    data: Sequence[PartBytes]

    def parts(self) -> list[ReadPart]:
        """Check and return the parts."""
        found = zip(self.data, self.manifest.parts, strict=True)
        return in_threads(lambda one: read_part(one[0], one[1], self.manifest), found)


class Source(ABC):
    """Protocol of sources: offer versions in an order in which they can be applied."""

    @abstractmethod
    def offers(self, held: Manifest | None, until: int | None = None) -> Iterator[Offer]:
        """Yield versions after ``held``; each is applied before the next is requested.

        ``until``: the last version to yield; a stream ignores it and yields its next version.
        """

    @abstractmethod
    def ask(self, held: Manifest | None) -> str:
        """Ask the sender for a full version after ``held``; return a sentence for the user."""

    def turns_to_full(self, held: Manifest | None, until: int | None) -> bool:
        """Return whether a full version after ``held`` is available; then none is requested."""
        return False

    def waits_for(self) -> str:
        """Return what the source waits for and since when; "" if nothing."""
        return ""

    def applied(self, apply_s: float, decode_s: float) -> None:  # noqa: B027
        """Record that the last offer was applied, and the seconds of decoding and applying it."""


@dataclass
class _Waiting:
    """A receiver's wait: for what, since when by two clocks, and whether it was logged."""

    what: str
    begun: float
    clock: str
    is_told: bool = False


class FolderSource(Source):
    """A folder of ``destinations.Folder``, or a copy of one."""

    def __init__(self, path: Path) -> None:
        """Hold ``path``, which may not exist yet."""
        self.path = path
        self._wants_full = False  # since an offer that could not be applied
        self._asked: Path | None = None  # the request file; the sender removes it when it answers
        self._waiting: _Waiting | None = None

    def offers(self, held: Manifest | None, until: int | None = None) -> Iterator[Offer]:
        """Yield the versions that lead to the newest one, or to ``until``.

        A version with a missing part ends the offers, unless a later full version is complete and
        can be used instead. Raises PublishError if a version of the chain is missing and no full
        version follows it.
        """
        while True:
            paths = manifests_in(self.path)  # one listing, on which everything below is based
            with ExitStack() as stack:
                try:
                    offer = self._offer(paths, held, until, stack)
                except FileNotFoundError as error:
                    # ``publish.keep`` may have removed versions meanwhile
                    if manifests_in(self.path) != paths:
                        continue
                    todo = "copy the folder again from the sender"
                    at = quoted_path(error.filename)
                    raise DamagedVersion(f"{at} is not there; {todo}") from None
                if offer is None:
                    return
                yield offer
            held = offer.manifest

    def _offer(
        self, paths: dict[int, Path], held: Manifest | None, until: int | None, stack: ExitStack
    ) -> Offer | None:
        """Return the version to apply after ``held``; None if there is none, or a part is missing.

        Raises FileNotFoundError if one of ``paths`` is gone.
        """
        newer = _newer(paths, held, until)
        manifest = self._next(paths, newer, held, until)
        if manifest is None:
            if not paths:
                self._note_waiting(f"a version in {quoted_path(self.path)}", held, asks=False)
            return None
        files = self._open(manifest, stack)
        if isinstance(files, list):
            return Offer(manifest, [FileBytes(file) for file in files])
        if not paths[manifest.version].exists():
            raise FileNotFoundError(2, "it was removed", paths[manifest.version])
        lost = f"{PARTS}/{files} of version {manifest.version}"
        for full in _full_ones(newer):
            found = self._open(full, stack)
            if isinstance(found, list):
                say(f"receiver: {lost} is not there: full version {full.version} is taken instead",
                    anywhere=True)  # fmt: skip
                return Offer(full, [FileBytes(file) for file in found])
        self._note_waiting(lost, held, asks=True)
        return None

    def _note_waiting(self, what: str, held: Manifest | None, asks: bool) -> None:
        """Record what is missing; after ``LOST_AFTER_S`` log it once, and ask for a full
        version.
        """
        now = time.monotonic()
        if self._waiting is None or self._waiting.what != what:
            self._waiting = _Waiting(what, now, time.strftime("%Y-%m-%d %H:%M:%S"))
        if self._waiting.is_told or now - self._waiting.begun < LOST_AFTER_S:
            return
        if held is None and not asks:  # the receiver itself reports a folder without any version
            return
        self._waiting.is_told = True
        todo = self.ask(held) if asks else "look whether the sender publishes to this folder"
        say(f"receiver: {self.waits_for()}; {todo}", anywhere=True)

    def waits_for(self) -> str:
        """Return what is missing, and since when."""
        if self._waiting is None:
            return ""
        seconds = time.monotonic() - self._waiting.begun
        return f"waits for {self._waiting.what} since {self._waiting.clock} ({seconds:.0f} s)"

    def _next(
        self,
        paths: dict[int, Path],
        newer: dict[int, Path],
        held: Manifest | None,
        until: int | None,
    ) -> Manifest | None:
        """Return the version to apply after ``held``; None if there is none."""
        if not newer:
            _check_newest(_newer(paths, None, until), held)
            return None
        if self._wants_full and (full := next(_full_ones(newer), None)) is not None:
            return full
        if held is not None and held.version + 1 in newer:
            found = read_manifest_file(newer[held.version + 1], held.version + 1)
            if found.full or (found.parent, found.parent_digest) == (held.version, held.digest):
                return found
            if found.base != held.base:
                return found  # the receiver reports what is wrong with it
        return self._full(newer, held)

    def _full(self, newer: dict[int, Path], held: Manifest | None) -> Manifest:
        """Return the newest full version. Raises DamagedVersion if there is none."""
        if (found := next(_full_ones(newer), None)) is not None:
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
        """Prefer full versions until one is applied; return whether an untried one exists."""
        if self._wants_full or held is None:
            return False
        self._wants_full = True
        newer = _newer(manifests_in(self.path), held, until)
        return next(_full_ones(newer), None) is not None

    def ask(self, held: Manifest | None) -> str:
        """Leave a file that requests a full version.

        The sender removes the file once a full version exists; this receiver removes it once it has
        applied another version. From a copy of the folder, the user must carry the file back.
        """
        if self._asked is None or not self._asked.exists():
            path = self.path / f"ask_full.{secrets.token_hex(4)}.json"
            try:
                with path.open("x") as file:
                    # the file name is the request, whatever happens to its contents
                    self._asked = path
                    json.dump({"held": 0 if held is None else held.version}, file)
            except OSError as error:
                if not path.exists():
                    return f"no full version was asked for ({error.strerror}); {BY_HAND}"
                self._asked = path
        where = quoted_path(self.path)
        return f"a full version was asked for in {where}: update again when it is there"

    def applied(self, apply_s: float, decode_s: float) -> None:
        """Withdraw the request for a full version: the receiver has a version to continue from."""
        self._wants_full, self._waiting = False, None
        if self._asked is not None:
            with contextlib.suppress(OSError):
                self._asked.unlink(missing_ok=True)
            self._asked = None

    def _open(self, manifest: Manifest, stack: ExitStack) -> list[BinaryIO] | str:
        """Open the parts; return the name of a missing one, since copies arrive in any order."""
        files: list[BinaryIO] = []
        for part in manifest.parts:
            try:
                files.append(stack.enter_context(open_file(self.path / PARTS / part.file)))
            except FileNotFoundError:
                return part.file
            except OSError as error:
                raise PublishError(
                    f"version {manifest.version}: {part.file} cannot be read "
                    f"({error.strerror}); make it readable"
                ) from None
        return files


def _newer(paths: Mapping[int, Path], held: Manifest | None, until: int | None) -> dict[int, Path]:
    """Return the manifests of ``paths`` after ``held`` up to ``until``."""
    low = 0 if held is None else held.version
    return {v: path for v, path in paths.items() if v > low and (until is None or v <= until)}


def _check_newest(paths: Mapping[int, Path], held: Manifest | None) -> None:
    """Raise PublishError if the newest of ``paths`` is not the version that is held."""
    if held is None or not paths:
        return
    found = read_manifest_file(paths[max(paths)], max(paths))
    if found.base != held.base:
        what = f"expected chain {held.base[:8]}, found {found.base[:8]}: another job writes here"
    elif found.version < held.version:
        what = f"this receiver holds version {held.version}: a replay of an old folder"
    elif found.digest != held.digest:
        what = "its manifest is not the one that was applied"
    else:
        return
    todo = "copy the folder again, or make a new WeightReceiver to follow it"
    raise PublishError(f"version {found.version}: {what}; {todo}")


def _full_ones(newer: dict[int, Path]) -> Iterator[Manifest]:
    """Yield the full versions in ``newer``, the newest first, skipping damaged manifests."""
    for version, path in reversed(newer.items()):
        with contextlib.suppress(DamagedVersion):
            if (found := read_manifest_file(path, version)).full:
                yield found
