"""Read versions for a receiver from a stream, whose parts are kept until their manifest comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import torch

from hybridcomp.errors import PublishError
from hybridcomp.foreign import one_line
from hybridcomp.publishing.checksums import bytes_of
from hybridcomp.publishing.records import DamagedVersion, Manifest, read_manifest
from hybridcomp.publishing.sources import BY_HAND, Offer, Source
from hybridcomp.publishing.spools import IN_MEMORY, Spool
from hybridcomp.publishing.streams import ABORT, DATA, VERSION, Readable, cut, fill, read_frame

#: bytes of a frame that are received at once
CHUNK = 1 << 26
#: most bytes of a manifest on a stream
MOST_MANIFEST = 1 << 30


class StreamSource(Source):
    """A stream of ``streams.Stream``; an offer is one version.

    Attributes:
        looks_on: whether to look for the next frame after a damaged head.
    """

    looks_on = True

    def __init__(self, stream: Readable) -> None:
        """Read from ``stream``."""
        self._stream: Readable = stream
        self._in_memory = 0  # bytes of the version that is being received
        self._has_asked = False
        self._may_be_full = True  # whether the last version may have been a full one
        self._is_ours = False  # whether a whole frame has come: others are damaged ones then

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

    def applied(self, apply_s: float, decode_s: float) -> None:
        """Note that a later request is a new one."""
        self._has_asked = False

    def _receive(self, stack: ExitStack, after_abort: bool) -> Offer | None:
        """Spool parts until their manifest comes; None at the end of the stream.

        ``after_abort``: whether to wait for the next version where one is given up. Raises
        PublishError where the stream is cut.
        """
        parts: dict[int, Spool] = {}
        skipped = self._in_memory = 0
        self._may_be_full = True
        while True:
            frame = read_frame(self._stream, bool(parts), self.looks_on and self._is_ours)
            if frame is None:
                return None
            self._is_ours = True
            kind, rank, nbytes, more = frame
            skipped += more
            if kind == DATA:
                if rank not in parts:
                    parts[rank] = stack.enter_context(closing(Spool()))
                self._copy(nbytes, parts[rank])
            elif kind == ABORT:
                for part in parts.values():
                    part.close()
                parts, skipped, self._in_memory = {}, 0, 0
                if not after_abort:
                    return None
            elif kind == VERSION:
                return self._offer(nbytes, parts, skipped)

    def _copy(self, nbytes: int, part: Spool) -> None:
        """Receive the bytes of a frame into ``part``."""
        while nbytes:
            chunk = torch.empty(min(nbytes, CHUNK), dtype=torch.uint8)
            if fill(self._stream, bytes_of(chunk)) < len(chunk):
                raise cut()
            fits = self._in_memory + len(chunk) <= IN_MEMORY
            self._in_memory += len(chunk) if fits else 0
            part.keep(chunk, fits)
            nbytes -= len(chunk)

    def _offer(self, nbytes: int, parts: dict[int, Spool], skipped: int) -> Offer:
        text = bytearray(min(nbytes, MOST_MANIFEST))
        if fill(self._stream, memoryview(text)) < len(text):
            raise cut()
        manifest = read_manifest(bytes(text), "the stream's manifest")
        self._may_be_full = manifest.full
        if skipped:
            raise DamagedVersion(
                f"version {manifest.version}: the head of a frame was damaged, {skipped} bytes of "
                "the stream were skipped"
            )
        missing = [part.rank for part in manifest.parts if part.rank not in parts]
        if missing:
            raise _lacks(manifest, missing)
        return Offer(manifest, [parts[part.rank] for part in manifest.parts])


def _lacks(manifest: Manifest, ranks: list[int]) -> PublishError:
    return DamagedVersion(
        f"version {manifest.version}: the stream has no part of rank(s) {ranks[:8]}"
    )
