"""Read versions for a receiver from a stream, whose parts are kept until their manifest comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import torch
from torch import Tensor

from hybridcomp.errors import PublishError
from hybridcomp.foreign import one_line
from hybridcomp.publishing.checksums import bytes_of
from hybridcomp.publishing.records import DamagedVersion, Manifest, read_manifest
from hybridcomp.publishing.sources import BY_HAND, Offer, Source
from hybridcomp.publishing.spools import IN_MEMORY, Spool
from hybridcomp.publishing.streams import ABORT, DATA, VERSION, Readable, cut, fill, read_frame

#: bytes of a frame that are received at once
CHUNK = 1 << 26
#: bytes of a version for each weight, at most, beside ``IN_MEMORY``; of one of an unknown model
MOST_OF_A_WEIGHT, MOST_UNKNOWN = 4, 1 << 50


class StreamSource(Source):
    """A stream of ``streams.Stream``; an offer is one version.

    Attributes:
        looks_on: whether to look for the next frame after a damaged head.
    """

    looks_on = True

    def __init__(self, stream: Readable) -> None:
        """Read from ``stream``."""
        self._stream: Readable = stream
        self._in_memory = self._nbytes = 0  # of the version that is being received
        self._most = MOST_UNKNOWN  # bytes that it can have
        self._lost: str | None = None  # why that version is not kept
        self._has_asked = False
        self._may_be_full = True  # whether the last version may have been a full one
        self._is_ours = False  # whether a whole frame has come: others are damaged ones then

    def offers(self, held: Manifest | None, until: int | None = None) -> Iterator[Offer]:
        """Yield the next version of the stream; nothing at its end."""
        with ExitStack() as stack:
            offer = self._receive(stack, held, after_abort=True)
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
            except (OSError, PublishError) as error:
                return f"no full version was asked for ({one_line(error)}); {BY_HAND}"
            self._has_asked = True
        return "a full version was asked for: update again"

    def applied(self, apply_s: float, decode_s: float) -> None:
        """Note that a later request is a new one."""
        self._has_asked = False

    def _receive(self, stack: ExitStack, held: Manifest | None, after_abort: bool) -> Offer | None:
        """Spool parts until their manifest comes; None at the end of the stream.

        A version that cannot be kept is read to its end: what comes behind it can be.
        ``after_abort``: whether to wait for the next version where one is given up. Raises
        PublishError where the stream is cut.
        """
        parts: dict[int, Spool] = {}
        skipped = self._in_memory = self._nbytes = 0
        self._lost = None
        self._most = MOST_UNKNOWN if held is None else IN_MEMORY + MOST_OF_A_WEIGHT * held.weights
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
                parts, skipped, self._in_memory, self._nbytes = {}, 0, 0, 0
                self._lost = None
                if not after_abort:
                    return None
            elif kind == VERSION:
                return self._offer(nbytes, parts, skipped)

    def _copy(self, nbytes: int, part: Spool) -> None:
        """Receive the bytes of a frame into ``part``, unless the version is lost."""
        while nbytes:
            chunk = torch.empty(min(nbytes, CHUNK), dtype=torch.uint8)
            if fill(self._stream, bytes_of(chunk)) < len(chunk):
                raise cut()
            nbytes -= len(chunk)
            self._nbytes += len(chunk)
            if self._nbytes > self._most and self._lost is None:
                todo = "make a new WeightReceiver where the sender has another model"
                self._lost = f"it has more than the {self._most} bytes that it can have; {todo}"
            if self._lost is None:
                self._keep(chunk, part)
            else:
                part.close()

    def _keep(self, chunk: Tensor, part: Spool) -> None:
        """Keep bytes of a part in memory, or in a temporary file; note where neither has room."""
        fits = self._in_memory + len(chunk) <= IN_MEMORY
        self._in_memory += len(chunk) if fits else 0
        try:
            part.keep(chunk, fits)
        except OSError as error:
            self._lost = (
                f"the temporary folder has no room for it ({one_line(error)}); make room, or name "
                "another one with TMPDIR"
            )
            part.close()

    def _offer(self, nbytes: int, parts: dict[int, Spool], skipped: int) -> Offer:
        text = bytearray(nbytes)
        if fill(self._stream, memoryview(text)) < len(text):
            raise cut()
        manifest = read_manifest(bytes(text), "the stream's manifest")
        self._may_be_full = manifest.full
        if self._lost is not None:
            raise DamagedVersion(f"version {manifest.version}: {self._lost}")
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
