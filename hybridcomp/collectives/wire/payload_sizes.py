"""Sizes of payloads that only a device knows.

An encoder of variable size on a GPU leaves the bytes that it used in a word there and returns at
once. Collectives exchange the words of all payloads in one message between devices and copy what
came to pinned memory; the host waits once for an exchange, for an event that others' work goes on
before. On a CPU the encoder returns the size and none of this is needed.

Over gloo between CPUs sizes stand in front of the payloads, in one message: a receiver makes room
for the longest that may come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from hybridcomp.codecs.base import Codec, align
from hybridcomp.collectives.wire import transport
from hybridcomp.collectives.wire.group import Group
from hybridcomp.collectives.wire.handle import Steps

SIZE_NBYTES = 8  # sizes of payloads travel as int64
cuda: Any = torch.cuda  # parts of it are untyped


class Arrival(Work):
    """Words on their way to the host; done when ``event`` has happened."""

    def __init__(self, host: Tensor, event: Any) -> None:
        super().__init__()
        self._host = host
        self._event = event

    def wait(self, timeout: object = None) -> bool:
        """Wait on the host."""
        self._event.synchronize()
        return True

    def sizes(self) -> list[int]:
        """The words, after ``wait``."""
        found: list[int] = self._host.tolist()
        return found


class Sizes:
    """Decides which encoders leave their sizes on the device, and brings these to the host."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def stay(self, codec: Codec, device: torch.device) -> bool:
        """Whether sizes of payloads of ``codec`` stay on ``device`` when they are encoded."""
        return device.type == "cuda" and not codec.fixed_size

    def copied(self, words: Tensor) -> Arrival:
        """Start to copy ``words`` (int64) to the host, on the current stream; nobody waits."""
        host = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
        host.copy_(words, non_blocking=True)
        event = cuda.Event()
        event.record(cuda.current_stream(words.device))
        return Arrival(host, event)

    def fetch(self, words: Tensor, message: Work, group: Group) -> Steps[list[int]]:
        """``words`` on the host, a part of which ``message`` fills in; yields what to wait for."""
        if words.is_cuda and not transport.STAGING.needed(words, group):
            arrival = self._copied_beside(words, message)
        else:
            yield message
            arrival = self.copied(words)
        yield arrival
        return arrival.sizes()

    def _copied_beside(self, words: Tensor, message: Work) -> Arrival:
        """Copy as ``copied`` does, behind ``message`` on a stream of its own.

        So the caller's stream waits neither for the message nor for the copy, and both are under
        way before anybody waits for them.
        """
        if words.device not in self._streams:
            self._streams[words.device] = cuda.Stream(words.device)
        stream = self._streams[words.device]
        with cuda.stream(stream):
            message.wait()  # orders the stream; the host goes on
            arrival = self.copied(words)
        words.record_stream(stream)
        return arrival


#: of this process; tests put another one here
SIZES = Sizes()


def in_front(codec: Codec, device: torch.device, group: Group) -> bool:
    """Whether sizes of payloads of ``codec`` stand in front of them; the same on all ranks."""
    stay = codec.fixed_size or SIZES.stay(codec, device)
    return not stay and transport.over_gloo(device, group)


def head_nbytes(count: int) -> int:
    """Bytes in front of ``count`` payloads for their sizes."""
    return align(SIZE_NBYTES * count)


def write_head(message: Tensor, nbytes: Sequence[int]) -> None:
    """Put sizes at the start of ``message`` (uint8)."""
    words = message[: SIZE_NBYTES * len(nbytes)].view(torch.int64)
    words.copy_(torch.tensor(nbytes, dtype=torch.int64))


def read_head(message: Tensor, count: int) -> list[int]:
    """What ``write_head`` wrote: ``count`` sizes."""
    found: list[int] = message[: SIZE_NBYTES * count].view(torch.int64).tolist()
    return found
