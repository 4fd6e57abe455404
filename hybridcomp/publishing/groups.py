"""Versions over a process group of torch.distributed: the sender's first rank and the receivers.

Every version begins with an all-reduce in which receivers say whether they need a full version and
how long they have applied the last one; then the frames of a stream (``streams``) are broadcast as
uint8. The sender waits for receivers that have not called ``update`` yet.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.job import small_messages
from hybridcomp.publishing.checksums import bytes_of
from hybridcomp.publishing.records import Manifest
from hybridcomp.publishing.sources import Offer
from hybridcomp.publishing.stream_sources import StreamSource
from hybridcomp.publishing.streams import Stream, tensor_of

#: bytes of a write that wait for the next one: heads of frames travel with what follows
SMALL = 64
ANNOUNCED = struct.Struct(f"<QQ{SMALL}s")


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return the device whose tensors ``group`` sends."""
    if "nccl" in str(dist.get_backend(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def greet(
    group: dist.ProcessGroup, *, sends: bool, needs_full: bool, apply_s: float
) -> tuple[int, bool, float]:
    """Begin a version: return the sender's rank in the group, what is needed, the most seconds."""
    mine = [dist.get_rank(group) + 1 if sends else 0, int(needs_full), math.ceil(apply_s * 1e6)]
    vector = torch.tensor(mine, dtype=torch.int64, device=device_of(group))
    sender, needed, microseconds = small_messages.most(vector, group).tolist()
    return sender - 1, bool(needed), microseconds / 1e6


class _Broadcasts:
    """Writes bytes as broadcasts of this rank: an announcement, then what is long as it is.

    An announcement is ``ANNOUNCED``: how many bytes it holds itself, how many follow, and its own.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._device = group, device_of(group)
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
    """Reads what ``_Broadcasts`` of ``sender`` wrote."""

    def __init__(self, group: dist.ProcessGroup, sender: int) -> None:
        self._group, self._device = group, device_of(group)
        self._source = dist.get_global_rank(group, sender)
        self._left = memoryview(b"")
        self._follows = 0  # bytes of the broadcast that comes next

    def read(self, nbytes: int, /) -> bytes:
        room = bytearray(nbytes)
        return bytes(room[: self.readinto(memoryview(room))])

    def readinto(self, room: memoryview, /) -> int:
        """Fill ``room`` as far as one broadcast does; what is long is received right into it."""
        if not len(self._left) and not self._follows:
            head = self._receive(torch.empty(ANNOUNCED.size, dtype=torch.uint8))
            held, self._follows, data = ANNOUNCED.unpack(bytes_of(head))
            self._left = memoryview(data)[:held]
        if not len(self._left):
            follows, self._follows = self._follows, 0
            if follows <= len(room):
                self._receive(torch.frombuffer(room[:follows], dtype=torch.uint8))
                return follows
            self._left = bytes_of(self._receive(torch.empty(follows, dtype=torch.uint8)))
        found = min(len(room), len(self._left))
        room[:found], self._left = self._left[:found], self._left[found:]
        return found

    def _receive(self, into: Tensor) -> Tensor:
        """Receive a broadcast into ``into``, on the host, and return it."""
        values = into.to(self._device)
        dist.broadcast(values, self._source, group=self._group)
        return into if values is into else into.copy_(values)


class GroupDestination(Stream):
    """A process group, on the first rank of the job; all other members receive."""

    def __init__(self, group: dist.ProcessGroup, ranks: tuple[int, ...]) -> None:
        """Send to ``group``; ``ranks``: of the job, of which only the first is in it."""
        super().__init__(_Broadcasts(group), ranks)
        self._group = group

    def wants_full(self) -> bool:
        """Wait for the receivers; return whether one of them needs a full version."""
        _, needed, seconds = greet(self._group, sends=True, needs_full=False, apply_s=0.0)
        self.apply_s = seconds or None
        return needed


class GroupSource(StreamSource):
    """A process group, on a receiver; an offer is one version."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Receive from ``group``."""
        self._group = group
        self._needs_full, self._apply_s = True, 0.0

    def offers(self, held: Manifest | None, until: int | None = None) -> Iterator[Offer]:
        """Yield the sender's next version; nothing where the sender gave it up."""
        sender, _, _ = greet(
            self._group, sends=False, needs_full=self._needs_full, apply_s=self._apply_s
        )
        self._needs_full = True  # until this version is applied
        self._stream = _Heard(self._group, sender)
        with ExitStack() as stack:
            offer = self._receive(stack, after_abort=False)
            if offer is not None:
                yield offer
            else:
                self._needs_full = held is None

    def ask(self, held: Manifest | None) -> str:
        """Have the next greeting say that a full version is needed."""
        self._needs_full = True
        return "the sender's next version is a full one: update again"

    def applied(self, apply_s: float) -> None:
        """Keep what the next greeting says."""
        self._needs_full, self._apply_s = False, apply_s
