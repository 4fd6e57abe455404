"""Streams of versions: frames of bytes, which rank 0 writes for all ranks of the job.

A frame has a head of 24 bytes (``hcf`` and the format, its kind, the rank of its part, the number
of bytes that follow, and a checksum of these fields), then its bytes. Kinds: D bytes of a part, V
the manifest, which ends a version, X a version that is given up, and on the way back A, a request
for a full version. After a damaged head a reader searches for the next one, and refuses the version
in between.

The other ranks send their parts to rank 0 one after the other, a bucket at a time, so rank 0 never
holds more than a bucket of another rank's part.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.errors import PublishError
from hybridcomp.job.devices import default_device
from hybridcomp.publishing.checksums import bytes_of
from hybridcomp.publishing.destinations import Destination
from hybridcomp.publishing.encoding import Sink
from hybridcomp.publishing.records import MOST_MANIFEST, Manifest

#: format number of frames, and of messages between members of a group
FORMAT = 2
NAME = b"hcf"
MARK = NAME + bytes([FORMAT])
DATA, VERSION, ABORT, ASK = b"D", b"V", b"X", b"A"
FRAME = struct.Struct("<4sc3xIQI")
#: most bytes that follow the head of a frame of a part
MOST_FRAME = 1 << 26
#: number of bytes in which the next head is searched after a damaged one: four buckets
MOST_SKIPPED = 1 << 26
OTHERS = "give the receiver a stream that only a publisher writes to"
#: bytes that are read at once from streams without ``readinto``
MOST_READ = 1 << 22
#: special sizes that end a part on its way to rank 0: complete, or given up after an error
WHOLE, GIVEN_UP = 0, -1


class Writable(Protocol):
    """A stream to which versions are written.

    It may also have methods ``wants_full``, which returns whether a receiver has asked for a full
    version, and ``takes_bytes``, which returns whether ``write`` would accept bytes without
    waiting.
    """

    def write(self, data: memoryview | bytes, /) -> object:
        """Write all of ``data``, or return how many bytes of it were written."""


class Readable(Protocol):
    """A stream from which versions are read.

    It may also have methods ``ask_full``, which asks the sender for a full version, and
    ``readinto``, which fills a writable buffer and returns the number of bytes; ``readinto`` is
    used instead of ``read``, and saves a copy.
    """

    def read(self, nbytes: int, /) -> bytes:
        """Return up to ``nbytes`` bytes, at least one unless the stream has ended."""


class Frame(NamedTuple):
    """Head of a frame, and the number of bytes that were skipped before it."""

    kind: bytes
    rank: int
    nbytes: int
    skipped: int = 0


def frame_head(kind: bytes, rank: int, nbytes: int) -> bytes:
    """Return the head of a frame."""
    head = FRAME.pack(MARK, kind, rank, nbytes, 0)[:-4]
    return head + zlib.crc32(head).to_bytes(4, "little")


def frame_in(data: bytes | bytearray) -> Frame | None:
    """Return the head at the beginning of ``data``; None if it is not a valid one."""
    mark, kind, rank, nbytes, checksum = FRAME.unpack_from(data)
    is_whole = mark == MARK and checksum == zlib.crc32(data[: FRAME.size - 4])
    fits = nbytes <= {DATA: MOST_FRAME, VERSION: MOST_MANIFEST}.get(kind, 0)
    return Frame(kind, rank, nbytes) if is_whole and fits else None


def read_frame(stream: Readable, begun: bool, look_on: bool = False) -> Frame | None:
    """Read the head of a frame; return None at the end of the stream.

    ``begun``: whether a version has begun, so that an end of the stream is an error. ``look_on``:
    whether to search for the next head after a damaged one. Raises PublishError.
    """
    head = bytearray(FRAME.size)
    read = fill(stream, memoryview(head))
    if read < FRAME.size:
        if not look_on and head[: min(read, len(MARK))] != MARK[:read]:
            raise foreign_bytes(head, OTHERS)
        if read or begun:
            raise cut()
        return None
    found = frame_in(head) or (_next_frame(stream, head) if look_on else None)
    if found is None or found.kind not in (DATA, VERSION, ABORT):
        raise foreign_bytes(head, OTHERS)
    return found


def _next_frame(stream: Readable, head: bytearray) -> Frame | None:
    """Read on after a damaged ``head`` until one is valid; None beyond ``MOST_SKIPPED`` bytes."""
    window, skipped = head[1:], 1
    while skipped < MOST_SKIPPED:
        place = window.find(MARK)
        if place < 0:  # the last bytes may be the beginning of a mark
            place = len(window) - len(MARK) + 1
        room = bytearray(FRAME.size - len(window) + place)
        if fill(stream, memoryview(room)) < len(room):
            raise cut()
        window, skipped = window[place:] + room, skipped + place
        found = frame_in(window)
        if found is not None:
            return found._replace(skipped=skipped)
        window, skipped = window[1:], skipped + 1
    return None


def foreign_bytes(head: bytes | bytearray, todo: str) -> PublishError:
    """Return the error about bytes that are not a frame of this format."""
    if head[: len(NAME)] == NAME and head[len(NAME)] != FORMAT:
        other = head[len(NAME)]
        return other_formats(1 if chr(other).isalpha() else other)
    return PublishError(
        f"expected a frame of published weights, found bytes {bytes(head[:4])!r}; {todo}"
    )


def other_formats(*formats: int) -> PublishError:
    """Return the error about another release on the other side."""
    found = " and ".join(map(str, formats))
    return PublishError(
        f"publish: expected format {FORMAT} of versions on their way, found {found}: install the "
        "same release of hybridcomp for sender and receivers"
    )


def fill(stream: Readable, room: memoryview) -> int:
    """Read until ``room`` is full or the stream ends; return the number of bytes."""
    into: Callable[[memoryview], int] | None = getattr(stream, "readinto", None)
    done = 0
    while done < len(room):
        if into is not None:
            found = into(room[done:])
        else:
            data = stream.read(min(len(room) - done, MOST_READ))
            found = len(data)
            room[done : done + found] = data
        if not found:
            break
        done += found
    return done


def cut() -> PublishError:
    """Return the error about a stream that ends inside a version."""
    return PublishError(
        "the stream ends inside a version, which is not applied; let the sender make a new stream, "
        "with a full version first"
    )


def tensor_of(data: memoryview | bytes) -> Tensor:
    """Return bytes as a uint8 tensor, sharing their memory if it is writable."""
    view = memoryview(data)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)


class Stream(Destination):
    """A stream that rank 0 writes; other ranks send their parts to it over torch.distributed."""

    feels_link = True

    def __init__(self, stream: Writable | None, ranks: tuple[int, ...]) -> None:
        """Hold the stream of rank 0.

        ``stream``: any object with ``write`` on the first of ``ranks``; unused elsewhere.
        """
        self._stream, self._ranks = stream, ranks
        self._rank = 0
        self._lost: Exception | None = None  # error while other ranks were sending
        self._is_open = False  # whether frames of an unfinished version were written
        self._owed = 0  # bytes of the last frame that were not written
        self._is_stuck = False  # whether the last write has failed

    def wants_full(self) -> bool:
        """Return whether the receiver has asked for a full version; False if it cannot ask."""
        self._end_last()
        hook: Callable[[], object] | None = getattr(self._stream, "wants_full", None)
        return hook is not None and bool(hook())

    def begin(self, version: int, rank: int) -> Sink:
        """Return a sink that writes this rank's part to the stream, or sends it to rank 0."""
        self._rank, self._lost, self._is_open = rank, None, True
        return _Frames(self._frame, rank) if rank == 0 else _Relay(self._ranks[0])

    def finish(self, problem: str | None) -> str:
        """End this rank's part; on rank 0 forward the parts of all other ranks."""
        rank = self._ranks.index(dist.get_rank())
        if rank:
            _send_size(self._ranks[0], WHOLE if problem is None else GIVEN_UP)
        else:
            for place in range(1, len(self._ranks)):
                self._pass_on(place, keeps=problem is None)
            if self._lost is not None:
                raise self._lost
        return f"r{rank:05d}"

    def _pass_on(self, place: int, keeps: bool) -> None:
        """Receive one rank's part and write it to the stream; after an error only receive it."""
        sender, device = self._ranks[place], default_device()
        room = torch.empty(0, dtype=torch.uint8, device=device)
        while True:
            size = torch.empty(1, dtype=torch.int64, device=device)
            dist.recv(size, sender)
            nbytes = int(size.item())
            if nbytes in (WHOLE, GIVEN_UP):
                return
            if room.numel() < nbytes:
                room = torch.empty(nbytes, dtype=torch.uint8, device=device)
            data = room[:nbytes]
            dist.recv(data, sender)
            try:
                if keeps and self._lost is None:
                    self._frame(DATA, place, bytes_of(data.cpu()))
            except Exception as error:
                self._lost = error

    def _frame(self, kind: bytes, rank: int, data: memoryview) -> None:
        if self._stream is None:
            raise PublishError("expected a stream on the first rank of the job, found None")
        most = MOST_FRAME if kind == DATA else MOST_MANIFEST
        self._is_open = True
        for low in range(0, max(1, len(data)), most):
            some = data[low : low + most]
            self._owed = FRAME.size + len(some)
            self._write(frame_head(kind, rank, len(some)))
            self._write(some)
        flush: Callable[[], object] | None = getattr(self._stream, "flush", None)
        if flush is not None and kind != DATA:
            flush()
        self._is_open = kind == DATA

    def _write(self, data: memoryview | bytes) -> None:
        """Write all of ``data``; unbuffered sockets and pipes may accept less at once."""
        assert self._stream is not None
        left, self._is_stuck = memoryview(data), True
        while len(left):
            taken = self._stream.write(left)
            taken = taken if isinstance(taken, int) else len(left)
            self._owed -= taken
            left = left[taken:]
        self._is_stuck = False

    def _end_last(self) -> None:
        """End a version that was cancelled in the middle of a frame, before the next one begins.

        The rest of the frame is sent as zeros. Raises PublishError at once if the receiver still
        accepts nothing.
        """
        if not self._is_open or self._stream is None:
            return
        takes: Callable[[], bool] | None = getattr(self._stream, "takes_bytes", None)
        if self._is_stuck and takes is not None and not takes():
            raise PublishError("the receiver still takes nothing; look why it stands still")
        zeros = memoryview(bytes(min(self._owed, MOST_READ)))
        while self._owed:
            self._write(zeros[: self._owed])
        self._frame(ABORT, 0, memoryview(b""))

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest, which makes the version readable."""
        self._frame(VERSION, 0, memoryview(manifest.to_json()))

    def abandon(self) -> None:
        """Tell the receiver that the version is cancelled, now or with the next version."""
        if self._ranks[0] == dist.get_rank() and self._is_open and not self._is_stuck:
            with contextlib.suppress(OSError, RuntimeError, PublishError):
                self._end_last()


class _Frames:
    """Write data as frames of one part."""

    def __init__(self, frame: Callable[[bytes, int, memoryview], None], rank: int) -> None:
        self._frame, self._rank = frame, rank

    def write(self, data: memoryview, /) -> None:
        if len(data):
            self._frame(DATA, self._rank, data)


class _Relay:
    """Send data to the rank that writes the stream."""

    def __init__(self, writer: int) -> None:
        self._writer, self._device = writer, default_device()

    def write(self, data: memoryview, /) -> None:
        if len(data):
            _send_size(self._writer, len(data))
            dist.send(tensor_of(data).to(self._device), self._writer)


def _send_size(writer: int, size: int) -> None:
    dist.send(torch.tensor([size], dtype=torch.int64, device=default_device()), writer)
