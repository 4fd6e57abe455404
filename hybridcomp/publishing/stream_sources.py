"""Read versions for a receiver from a stream, which is spooled to temporary files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from hybridcomp.errors import PublishError
from hybridcomp.foreign import one_line
from hybridcomp.publishing.records import DamagedVersion, Manifest, read_manifest
from hybridcomp.publishing.sources import BY_HAND, Offer, Source
from hybridcomp.publishing.streams import ABORT, DATA, VERSION, Readable, cut, read_frame

#: most bytes of a manifest on a stream
MOST_MANIFEST = 1 << 30


class StreamSource(Source):
    """A stream of ``streams.FrameWriter``; an offer is one version."""

    def __init__(self, stream: Readable) -> None:
        """Read from ``stream``."""
        self._stream: Readable = stream
        self._has_asked = False
        self._may_be_full = True  # whether the last version may have been a full one

    def offers(self, held: Manifest | None, until: int | None = None) -> Iterator[Offer]:
        """Yield the next version of the stream; nothing at its end."""
        with ExitStack() as stack:
            offer = self._receive(stack, after_abort=True)
            if offer is not None:
                yield offer

    def ask(self, held: Manifest | None) -> str:
        """Ask through the stream, where it has a way back; once, until a full version has come."""
        hook: Callable[[], object] | None = getattr(self._stream, "ask_full", None)
        if hook is None:
            return BY_HAND
        if not self._has_asked or self._may_be_full:
            try:
                hook()
            except OSError as error:
                return f"no full version was asked for ({one_line(error)}); {BY_HAND}"
            self._has_asked = True
        return "a full version was asked for: update again"

    def applied(self, apply_s: float) -> None:
        """Note that a later request is a new one."""
        self._has_asked = False

    def _receive(self, stack: ExitStack, after_abort: bool) -> Offer | None:
        """Spool parts until their manifest comes; None at the end of the stream.

        ``after_abort``: whether to wait for the next version where one is given up. Raises
        PublishError where the stream is cut.
        """
        files: dict[int, Any] = {}
        self._may_be_full = True
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
        self._may_be_full = manifest.full
        missing = [part.rank for part in manifest.parts if part.rank not in files]
        if missing:
            raise _lacks(manifest, missing)
        return Offer(manifest, [files[part.rank] for part in manifest.parts])


def _lacks(manifest: Manifest, ranks: list[int]) -> PublishError:
    return DamagedVersion(
        f"version {manifest.version}: the stream has no part of rank(s) {ranks[:8]}"
    )
