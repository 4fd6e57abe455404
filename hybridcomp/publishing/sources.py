"""Read versions for a receiver: from a folder, or a stream that is spooled to temporary files."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hybridcomp.errors import PublishError
from hybridcomp.foreign import one_line
from hybridcomp.publishing.checksums import in_threads
from hybridcomp.publishing.destinations import PARTS, manifests_in, read_manifest_file
from hybridcomp.publishing.parts import ReadPart, read_part
from hybridcomp.publishing.records import ASK, Manifest, read_manifest
from hybridcomp.publishing.streams import ABORT, DATA, VERSION, Readable, read_frame

#: most bytes of a manifest on a stream
MOST_MANIFEST = 1 << 30


@dataclass
class Offer:
    """A version that is there: its manifest, and its parts as files."""

    manifest: Manifest
    files: list[BinaryIO]

    def parts(self) -> list[ReadPart]:
        """Check and return the parts."""
        found = zip(self.files, self.manifest.parts, strict=True)
        return in_threads(lambda one: read_part(one[0], one[1], self.manifest), found)


class Source(ABC):
    """Offers versions in the order in which they can be applied."""

    @abstractmethod
    def offers(self, held: Manifest | None, until: int | None = None) -> Iterator[Offer]:
        """Yield versions after ``held``; each is applied before the next is asked for.

        ``until``: the last version to yield; a stream yields its next one, whichever it is.
        """

    def report(self, apply_s: float, failed: bool) -> None:  # noqa: B027
        """Tell the sender, where it listens, what applying took, and whether it failed."""


class FolderSource(Source):
    """A folder of ``destinations.Folder``, or a copy of one."""

    def __init__(self, path: Path) -> None:
        """Hold ``path``, which may not exist yet."""
        self.path = path
        self._has_asked: set[int] = set()

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
                yield Offer(manifest, files)
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
                    raise PublishError(f"{one_line(error.filename)} is not there; {todo}") from None

    def _next(self, held: Manifest | None, until: int | None) -> Manifest | None:
        """Return the version to apply after ``held``; None where there is none."""
        paths = manifests_in(self.path)
        if until is not None:
            paths = {version: path for version, path in paths.items() if version <= until}
        newer = {v: path for v, path in paths.items() if held is None or v > held.version}
        if not newer:
            self._check_newest(paths, held)
            return None
        if held is not None and held.version + 1 in newer:
            found = read_manifest_file(newer[held.version + 1], held.version + 1)
            if found.full or (found.parent, found.parent_digest) == (held.version, held.digest):
                return found
            if found.base != held.base:
                return found  # the receiver says what is wrong with it
        return self._full(newer, held)

    def _check_newest(self, paths: dict[int, Path], held: Manifest | None) -> None:
        """Raise PublishError where the folder's newest version is not the one that is held."""
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
        """Return the newest full version; asks for one, and raises, where there is none."""
        for version, path in reversed(newer.items()):
            if (found := read_manifest_file(path, version)).full:
                return found
        at = 1 if held is None else held.version + 1
        last = max(newer)
        self._ask(last)
        missing = f"version {at} is missing" if at not in newer else (
            f"version {at} does not follow the version {at - 1} of this receiver"
        )  # fmt: skip
        raise PublishError(
            f"{missing}, and no full version comes after it (newest: {last}); a full version was "
            f"asked for in {self.path}: wait for it, or copy the folder again"
        )

    def _ask(self, newest: int) -> None:
        """Leave a file that asks the sender for a full version; in a copy it asks in vain."""
        if newest in self._has_asked:
            return
        self._has_asked.add(newest)
        path = self.path / f"ask_full.{secrets.token_hex(4)}.json"
        with contextlib.suppress(OSError), path.open("x") as file:
            json.dump({"newest": newest}, file)

    def _open(self, manifest: Manifest, stack: ExitStack) -> list[BinaryIO] | None:
        """Open the parts; None where one is not there yet: copies come in any order."""
        files: list[BinaryIO] = []
        for part in manifest.parts:
            try:
                files.append(stack.enter_context((self.path / PARTS / part.file).open("rb")))
            except FileNotFoundError:
                return None
            except OSError as error:
                raise PublishError(
                    f"version {manifest.version}: {part.file} cannot be read "
                    f"({os.strerror(error.errno or 0)}); make it readable"
                ) from None
        return files

    def _was_removed(self, manifest: Manifest) -> bool:
        """Return whether the sender has deleted a version since it was read (``publish.keep``)."""
        return manifest.version not in manifests_in(self.path)


class StreamSource(Source):
    """A stream of ``streams.FrameWriter``; an offer is one version."""

    def __init__(self, stream: Readable) -> None:
        """Read from ``stream``."""
        self._stream: Readable = stream

    def offers(self, held: Manifest | None, until: int | None = None) -> Iterator[Offer]:
        """Yield the next version of the stream; nothing at its end."""
        with ExitStack() as stack:
            offer = self._receive(stack, after_abort=True)
            if offer is not None:
                yield offer

    def _receive(self, stack: ExitStack, after_abort: bool) -> Offer | None:
        """Spool parts until their manifest comes; None at the end of the stream.

        ``after_abort``: whether to wait for the next version where one is given up. Raises
        PublishError where the stream is cut.
        """
        files: dict[int, Any] = {}
        while True:
            frame = read_frame(self._stream, begun=bool(files))
            if frame is None:
                return None
            kind, rank, nbytes = frame
            if kind == DATA:
                if rank not in files:
                    files[rank] = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
                self._copy(nbytes, files[rank])
            elif kind == ABORT:
                for file in files.values():
                    file.close()
                files = {}
                if not after_abort:
                    return None
            elif kind == VERSION:
                return self._offer(nbytes, files)

    def _copy(self, nbytes: int, file: Any) -> None:
        while nbytes:
            data = self._stream.read(min(nbytes, 1 << 22))
            if not data:
                raise cut()
            file.write(data)
            nbytes -= len(data)

    def _offer(self, nbytes: int, files: dict[int, Any]) -> Offer:
        text = bytearray()
        while len(text) < min(nbytes, MOST_MANIFEST):
            data = self._stream.read(nbytes - len(text))
            if not data:
                raise cut()
            text += data
        manifest = read_manifest(bytes(text), "the stream's manifest")
        missing = [part.rank for part in manifest.parts if part.rank not in files]
        if missing:
            raise _lacks(manifest, missing)
        return Offer(manifest, [files[part.rank] for part in manifest.parts])


def cut() -> PublishError:
    """Make the error about a stream that ends inside a version."""
    return PublishError(f"the stream ends inside a version, which is not applied; {ASK}")


def _lacks(manifest: Manifest, ranks: list[int]) -> PublishError:
    return PublishError(
        f"version {manifest.version}: the stream has no part of rank(s) {ranks[:8]}; {ASK}"
    )
