"""Send versions over a process group of the sender's first rank and all receivers.

Every version begins with an all-reduce in which receivers state whether they need a full version,
and how long they took to receive, decode and apply the last version. Then the sender broadcasts the
frames of a stream (``streams``) as uint8. The sender waits for receivers that have not called
``update`` yet.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.job import small_messages
from hybridcomp.job.devices import default_device
from hybridcomp.publishing.checksums import bytes_of
from hybridcomp.publishing.choosing import ReceiverTimes
from hybridcomp.publishing.records import Manifest
from hybridcomp.publishing.sources import Offer
from hybridcomp.publishing.stream_sources import CHUNK, StreamSource
from hybridcomp.publishing.streams import FORMAT, Stream, other_formats, tensor_of

#: writes of at most this many bytes are held until the next write, so that frame heads travel with
#: their data
SMALL = 64
ANNOUNCED = struct.Struct(f"<QQ{SMALL}s")
#: larger than any format number: the maximum of this minus the format gives the oldest format
LAST_FORMAT = 1 << 30


@dataclass
class Greeting:
    """A member's statement at the start of a version; ``exchange`` takes each field's maximum.

    Attributes:
        sender: the sender's rank in the group, stated by the sender; receivers state -1.
        needs_full: whether a receiver needs a full version.
        apply_s, decode_s, receive_s: seconds that a receiver took for the last version.
    """

    sender: int = -1
    needs_full: bool = False
    apply_s: float = 0.0
    decode_s: float = 0.0
    receive_s: float = 0.0

    def exchange(self, group: dist.ProcessGroup) -> Greeting:
        """Return the combined greeting of all members; a collective.

        Raises PublishError on all members if their formats differ.
        """
        times = [math.ceil(s * 1e6) for s in (self.apply_s, self.decode_s, self.receive_s)]
        formats = [FORMAT, LAST_FORMAT - FORMAT]
        mine = [*formats, self.sender + 1, int(self.needs_full), *times]
        vector = torch.tensor(mine, dtype=torch.int64, device=default_device(group))
        newest, left, sender, needed, *found = small_messages.most(vector, group).tolist()
        if newest != LAST_FORMAT - left:
            raise other_formats(LAST_FORMAT - left, newest)
        return Greeting(sender - 1, bool(needed), *(one / 1e6 for one in found))


class _Broadcasts:
    """Write bytes as broadcasts from this rank: an announcement, then long data unchanged.

    An announcement has the fixed layout ``ANNOUNCED``: the number of bytes inside it, the number of
    bytes in the broadcast that follows (0: none), and the bytes inside it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._device = group, default_device(group)
        self._waiting = bytearray()

    def write(self, data: memoryview | bytes, /) -> None:
        if len(data) > SMALL:
            self._announce(len(data))
            self._send(tensor_of(data))
            return
        if len(self._waiting) + len(data) > SMALL:
            self.flush()
        self._waiting += data

    def flush(self) -> None:
        if self._waiting:
            self._announce(0)

    def _announce(self, follows: int) -> None:
        held, self._waiting = self._waiting, bytearray()
        head = ANNOUNCED.pack(len(held), follows, bytes(held))
        self._send(tensor_of(head))

    def _send(self, values: Tensor) -> None:
        dist.broadcast(values.to(self._device), dist.get_rank(), group=self._group)


class _Heard:
    """Read what the ``_Broadcasts`` of ``sender`` wrote."""

    def __init__(self, group: dist.ProcessGroup, sender: int, spare: Tensor) -> None:
        self._group, self._device, self._spare = group, default_device(group), spare
        self._source = dist.get_global_rank(group, sender)
        self._left = memoryview(b"")
        self._follows = 0  # bytes of the next broadcast

    def read(self, nbytes: int, /) -> bytes:
        room = bytearray(nbytes)
        return bytes(room[: self.readinto(memoryview(room))])

    def readinto(self, room: memoryview, /) -> int:
        """Fill ``room`` from at most one broadcast, directly if its data is long."""
        if not len(self._left) and not self._follows:
            head = self._receive(self._spare[: ANNOUNCED.size])
            held, self._follows, data = ANNOUNCED.unpack(bytes_of(head))
            self._left = memoryview(data)[:held]
        if not len(self._left):
            follows, self._follows = self._follows, 0
            if follows <= len(room):
                self._receive(torch.frombuffer(room[:follows], dtype=torch.uint8))
                return follows
            self._left = bytes_of(self._receive(self._behind(follows)))
        found = min(len(room), len(self._left))
        room[:found], self._left = self._left[:found], self._left[found:]
        return found

    def _behind(self, nbytes: int) -> Tensor:
        """Return scratch memory for a broadcast that is only partly needed."""
        if nbytes > len(self._spare):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return self._spare[:nbytes]

    def _receive(self, into: Tensor) -> Tensor:
        """Receive a broadcast into ``into``, which is on the host, and return it."""
        values = into.to(self._device)
        dist.broadcast(values, self._source, group=self._group)
        return into if values is into else into.copy_(values)


class GroupDestination(Stream):
    """A process group, on the first rank of the job; all other members receive."""

    def __init__(self, group: dist.ProcessGroup, ranks: tuple[int, ...]) -> None:
        """Send to ``group``; ``ranks``: the job's ranks, of which only the first is in the
        group.
        """
        super().__init__(_Broadcasts(group), ranks)
        self._group = group
        # begin of the current version, and seconds of the last one
        self._begun, self._sent_s = 0.0, 0.0

    def wants_full(self) -> bool:
        """Wait for the receivers; return whether any of them needs a full version."""
        self._end_last()
        told = Greeting(sender=dist.get_rank(self._group)).exchange(self._group)
        self._begun, self._is_open = time.perf_counter(), True
        late_s = max(0.0, told.receive_s - self._sent_s)
        has_applied = told.apply_s > 0.0
        self.receivers = ReceiverTimes(told.apply_s, told.decode_s, late_s) if has_applied else None
        return told.needs_full

    def commit(self, manifest: Manifest) -> None:
        """Send the manifest, which makes the version readable."""
        super().commit(manifest)
        self._sent_s = time.perf_counter() - self._begun


class GroupSource(StreamSource):
    """A process group, on a receiver; an offer is one version."""

    looks_on = False  # the sender waits until all broadcasts of a version are received

    def __init__(self, group: dist.ProcessGroup, weights: int | None) -> None:
        """Receive from ``group``; ``weights``: as for ``WeightReceiver``."""
        self._group, self._weights = group, weights
        self._next = Greeting(needs_full=True)
        # allocated at the beginning: a member without memory for a broadcast would block all others
        self._spare, self._heard = (
            torch.empty(CHUNK, dtype=torch.uint8, device="cpu") for _ in range(2)
        )

    def offers(self, held: Manifest | None, until: int | None = None) -> Iterator[Offer]:
        """Yield the sender's next version; nothing if the sender gave it up."""
        told = self._next.exchange(self._group)
        begun = time.perf_counter()
        self._next = Greeting(needs_full=True)  # stays so until this version is applied
        self._stream = _Heard(self._group, told.sender, self._heard)
        with ExitStack() as stack:
            offer = self._receive(stack, held, after_abort=False)
            self._next.receive_s = time.perf_counter() - begun
            if offer is not None:
                yield offer
            else:
                self._next = Greeting(needs_full=held is None)

    def ask(self, held: Manifest | None) -> str:
        """Request a full version in the next greeting."""
        self._next.needs_full = True
        return "the sender's next version is a full one: update again"

    def applied(self, apply_s: float, decode_s: float) -> None:
        """Store the times for the next greeting."""
        # at least a microsecond: members that have applied nothing state 0
        self._next = Greeting(-1, False, max(apply_s, 1e-6), decode_s, self._next.receive_s)
