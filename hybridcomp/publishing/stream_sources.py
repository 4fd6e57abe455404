"""Read versions from a stream for a receiver; parts are kept until their manifest arrives."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import torch
from torch import Tensor

from hybridcomp.errors import PublishError
from hybridcomp.escaping import one_line
from hybridcomp.publishing.checksums import bytes_of
from hybridcomp.publishing.part_buffers import IN_MEMORY, Spool
from hybridcomp.publishing.records import DamagedVersion, Manifest, read_manifest
from hybridcomp.publishing.sources import BY_HAND, Offer, Source
from hybridcomp.publishing.streams import ABORT, DATA, VERSION, Readable, cut, fill, read_frame

#: most bytes of a frame that are received at once
CHUNK = 1 << 26
#: most bytes of a version per weight, in addition to ``IN_MEMORY``
MOST_OF_A_WEIGHT = 4
#: bytes of memory counted for each buffered frame, even an empty one, in addition to its data
FRAME_COSTS = 1024
#: a version of more than this many times the bytes that it can have is not read to its end
TOO_LONG = 2
NO_MEMORY = "was not kept: this host has no memory for it; give it more"


def host_weights() -> int:
    """Return how many 16-bit weights fit into this host's memory, at two bytes each."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


class StreamSource(Source):
    """A stream of ``streams.Stream``; an offer is one version.

    Attributes:
        looks_on: whether to search for the next frame after a damaged head, and to stop reading a
            version that does not end.
    """

    looks_on = True

    def __init__(self, stream: Readable, weights: int | None) -> None:
        """Read from ``stream``; ``weights``: as for ``WeightReceiver``."""
        self._stream: Readable = stream
        self._weights = weights
        # counts of the version that is being received
        self._in_memory = self._nbytes = self._skipped = 0
        self._most, self._todo = 0, ""  # most bytes that it can have, and advice if it has more
        self._lost: str | None = None  # why the version is not kept
        # buffer for reading a lost version to its end; uses no memory until it is written
        self._spare = torch.empty(CHUNK, dtype=torch.uint8, device="cpu")
        self._has_asked = False
        self._may_be_full = True  # whether the last version may have been a full one
        # whether a complete frame has arrived, so that anything else is a damaged frame
        self._is_ours = False

    def offers(self, held: Manifest | None, until: int | None = None) -> Iterator[Offer]:
        """Yield the next version of the stream; nothing at its end."""
        with ExitStack() as stack:
            offer = self._receive(stack, held, after_abort=True)
            if offer is not None:
                yield offer

    def ask(self, held: Manifest | None) -> str:
        """Ask through the stream, if it can carry requests; once until a full version arrives."""
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
        """Let the next ``ask`` send a new request."""
        self._has_asked = False

    def _receive(self, stack: ExitStack, held: Manifest | None, after_abort: bool) -> Offer | None:
        """Spool parts until their manifest arrives; return None at the end of the stream.

        A version that cannot be kept is read to its end, so that the next one can be received.
        ``after_abort``: whether to wait for the next version if the sender gives one up. Raises
        PublishError if the stream is cut off, or if the version has no end.
        """
        parts: dict[int, Spool] = {}
        self._begin(held)
        while True:
            begun = self._nbytes > 0
            frame = read_frame(self._stream, begun, self.looks_on and self._is_ours)
            if frame is None:
                return None
            self._is_ours = True
            kind, rank, nbytes, more = frame
            self._skipped += more
            if kind == VERSION:
                return self._offer(nbytes, parts)
            if kind == DATA:
                if rank not in parts and self._lost is None:
                    parts[rank] = stack.enter_context(closing(Spool()))
                self._copy(nbytes, parts.get(rank))
            elif not after_abort:
                return None
            else:
                self._begin(held)
            if kind == ABORT or self._lost is not None:
                stack.close()
                parts = {}

    def _begin(self, held: Manifest | None) -> None:
        """Prepare for a version; ``held`` or the user's limit determines its most bytes."""
        self._skipped = self._in_memory = self._nbytes = 0
        self._lost, self._may_be_full = None, True
        if held is not None:
            weights, todo = held.weights, "where the sender has another model make a new receiver"
        elif self._weights is not None:
            weights, todo = self._weights, "say to WeightReceiver how many weights the sender has"
        else:
            weights, todo = host_weights(), "this host has no memory for such a model: give it more"
        self._most, self._todo = IN_MEMORY + MOST_OF_A_WEIGHT * weights, todo

    def _copy(self, nbytes: int, part: Spool | None) -> None:
        """Receive the bytes of a frame into ``part``, unless the version is lost."""
        self._count(FRAME_COSTS)
        while nbytes:
            chunk = self._room(min(nbytes, CHUNK))
            if fill(self._stream, bytes_of(chunk)) < len(chunk):
                raise cut()
            nbytes -= len(chunk)
            self._count(len(chunk))
            if part is not None and self._lost is None:
                self._keep(chunk, part)
        if self.looks_on and self._nbytes > TOO_LONG * self._most:
            raise PublishError(f"a version {self._lost}; it has no end: connect again")

    def _room(self, nbytes: int) -> Tensor:
        """Return memory for bytes of a part; mark the version as lost if the host has none."""
        if self._lost is None:
            try:
                return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            except (MemoryError, RuntimeError):  # torch's errors for missing memory
                self._lost = NO_MEMORY
        return self._spare[:nbytes]

    def _count(self, nbytes: int) -> None:
        """Count bytes of the version, and mark it as lost if it has too many."""
        self._nbytes += nbytes
        if self._nbytes > self._most and self._lost is None:
            self._lost = f"has more than the {self._most} bytes that it can have; {self._todo}"

    def _keep(self, chunk: Tensor, part: Spool) -> None:
        """Keep bytes of a part in memory or a temporary file; if neither has room, mark the
        version as lost.
        """
        fits = self._in_memory + len(chunk) <= IN_MEMORY
        self._in_memory += len(chunk) if fits else 0
        try:
            part.keep(chunk, fits)
        except OSError as error:
            self._lost = (
                f"was not kept: the temporary folder has no room for it ({one_line(error)}); make "
                "room, or name another one with TMPDIR"
            )
        except (MemoryError, RuntimeError):
            self._lost = NO_MEMORY

    def _offer(self, nbytes: int, parts: dict[int, Spool]) -> Offer:
        text = bytearray(nbytes)
        if fill(self._stream, memoryview(text)) < len(text):
            raise cut()
        manifest = read_manifest(bytes(text), "the stream's manifest")
        self._may_be_full = manifest.full
        if self._lost is not None:
            raise DamagedVersion(f"version {manifest.version} {self._lost}")
        if self._skipped:
            raise DamagedVersion(
                f"version {manifest.version}: the head of a frame was damaged, {self._skipped} "
                "bytes of the stream were skipped"
            )
        missing = [part.rank for part in manifest.parts if part.rank not in parts]
        if missing:
            raise DamagedVersion(
                f"version {manifest.version}: the stream has no part of rank(s) {missing[:8]}"
            )
        return Offer(manifest, [parts[part.rank] for part in manifest.parts])
