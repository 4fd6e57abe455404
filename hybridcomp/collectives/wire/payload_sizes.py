"""Exchange the sizes of variable-size payloads, and read sizes that are on a device.

An encoder of variable size on a GPU writes the number of bytes it used into a word on the device
and returns at once. Collectives exchange the words of all payloads in one message between devices
and copy the received words to pinned memory. The host waits for this copy once per exchange, while
other streams keep running. On a CPU the encoder returns the size, so nothing is copied.

Over gloo between CPUs sizes precede the payloads in the same message, and a receiver allocates room
for the largest possible payloads.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import le
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from hybridcomp.codecs.base import Codec, align
from hybridcomp.collectives.wire import staging
from hybridcomp.collectives.wire.group import Group
from hybridcomp.collectives.wire.handle import Steps
from hybridcomp.errors import CodecError

SIZE_NBYTES = 8  # sizes of payloads travel as int64
cuda: Any = torch.cuda  # parts of torch.cuda are untyped


class Arrival(Work):
    """Copy of words to the host; it is complete once ``event`` has happened."""

    def __init__(self, host: Tensor, event: Any) -> None:
        super().__init__()
        self._host = host
        self._event = event

    def wait(self, timeout: object = None) -> bool:
        """Wait on the host."""
        self._event.synchronize()
        return True

    def sizes(self) -> list[int]:
        """Return the words, after ``wait``."""
        found: list[int] = self._host.tolist()
        return found


class SizeReader:
    """Copy payload sizes to the host, for encoders that leave them on a device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def stay(self, codec: Codec, device: torch.device) -> bool:
        """Return whether ``codec`` leaves the sizes of its payloads on ``device``."""
        return device.type == "cuda" and not codec.fixed_size

    def copied(self, words: Tensor) -> Arrival:
        """Start copying ``words`` (int64) to the host on the current stream, without waiting."""
        host = torch.empty(words.shape, dtype=words.dtype, pin_memory=True, device="cpu")
        host.copy_(words, non_blocking=True)
        event = cuda.Event()
        event.record(cuda.current_stream(words.device))
        return Arrival(host, event)

    def fetch(self, words: Tensor, message: Work, group: Group) -> Steps[list[int]]:
        """Copy ``words``, part of which ``message`` fills in, to the host and return them."""
        if words.is_cuda and not staging.STAGING.needed(words, group):
            arrival = self._copied_beside(words, message)
        else:
            yield message
            arrival = self.copied(words)
        yield arrival
        return arrival.sizes()

    def _copied_beside(self, words: Tensor, message: Work) -> Arrival:
        """Copy like ``copied``, after ``message``, on a separate stream.

        The caller's stream then waits neither for the message nor for the copy.
        """
        if words.device not in self._streams:
            self._streams[words.device] = cuda.Stream(words.device)
        stream = self._streams[words.device]
        with cuda.stream(stream):
            message.wait()  # orders the stream, never blocks the host
            arrival = self.copied(words)
        words.record_stream(stream)
        return arrival


#: the reader of this process; tests replace it
SIZES = SizeReader()


def check_sizes(
    codec: Codec, found: Sequence[Sequence[int]], most: Sequence[Sequence[int]], group: Group
) -> None:
    """Raise CodecError for a size that ``codec`` never produces, before memory is allocated for it.

    Args:
        codec: codec of the payloads.
        found: payload bytes announced by each group rank.
        most: most payload bytes of each group rank.
        group: group of the message.
    """
    for rank, (row, limits) in enumerate(zip(found, most, strict=True)):
        if all(map(le, row, limits)) and min(row, default=0) >= 0:
            continue
        # ranks that gather in several hops belong to several groups
        who = f"{rank} of {group.size} that gather" if group.hops else group.global_ranks[rank]
        for nbytes, largest in zip(row, limits, strict=True):
            check_size(codec, f"rank {who}", nbytes, largest)


def check_size(codec: Codec, sender: str, nbytes: int, largest: int) -> None:
    """Raise CodecError unless a payload of ``codec`` has at most ``largest`` bytes.

    ``nbytes``: its size, as announced by ``sender``.
    """
    if not 0 <= nbytes <= largest:
        raise CodecError(
            f"{sender} announces a payload of {nbytes} bytes with {codec.spec}, which has at most "
            f"{largest}: the size was damaged there or on its way; go on from the last checkpoint"
        )


def in_front(codec: Codec, device: torch.device, group: Group) -> bool:
    """Return whether one message has the sizes and then the payloads; equal on all ranks.

    It does not if payloads go over several hops, since later hops would not know the lengths.
    """
    stay = codec.fixed_size or SIZES.stay(codec, device)
    return not stay and not group.hops and group.backends.get(device.type) == "gloo"


def head_nbytes(count: int) -> int:
    """Return the bytes in front of ``count`` payloads for their sizes."""
    return align(SIZE_NBYTES * count)


def write_head(message: Tensor, nbytes: Sequence[int]) -> None:
    """Write sizes to the start of ``message`` (uint8)."""
    words = message[: SIZE_NBYTES * len(nbytes)].view(torch.int64)
    words.copy_(torch.tensor(nbytes, dtype=torch.int64, device="cpu"))


def read_head(message: Tensor, count: int) -> list[int]:
    """Read the ``count`` sizes that ``write_head`` wrote."""
    found: list[int] = message[: SIZE_NBYTES * count].view(torch.int64).tolist()
    return found
