"""Frames between neighbouring stages: a JSON header and the bytes of a hop, as one message.

Receives are posted ahead, as many as there are batches in flight, with room for the largest frame:
gloo sends once its receiver is ready, and a hop then takes one way of the link. A thread waits for
them, so that a stage that waits for its neighbour also notices a failure anywhere else.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from hybridcomp.collectives import Group, Meter
from hybridcomp.collectives.wire import transport
from hybridcomp.job.agreement import LOOK_S
from hybridcomp.job.gates import check_failed

#: payloads begin at multiples of this
ALIGNED = 16
#: seconds that a rank gives its neighbour to end, after a failure
ENDS_S = 5.0


@dataclass(frozen=True)
class HopFrame:
    """What one stage tells the next, and the bytes of its hidden states; None: it has ended."""

    said: Any
    payload: Tensor

    def packed(self) -> Tensor:
        """Return the frame as one uint8 tensor on the CPU."""
        said = self.said and {**self.said, "nbytes": self.payload.numel()}
        text = json.dumps(said).encode()
        text = len(text).to_bytes(8, "little") + text
        text += b" " * (-len(text) % ALIGNED)
        head = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return torch.cat([head, self.payload.cpu()]) if self.payload.numel() else head

    @classmethod
    def unpacked(cls, received: Tensor) -> HopFrame:
        """Return the frame of ``packed``, which shares memory; bytes behind its payload stay."""
        size = int(received[:8].view(torch.int64))
        said = json.loads(bytes(received[8 : 8 + size].tolist()))
        start = -(-(8 + size) // ALIGNED) * ALIGNED
        return cls(said, received[start:])


END = HopFrame(None, torch.empty(0, dtype=torch.uint8))


class Outgoing:
    """Frames to the global rank ``to``; sends return at once."""

    def __init__(self, to: int, group: Group, ahead: int, nbytes: int) -> None:
        self._to, self._group, self._ahead, self._nbytes = to, group, ahead, nbytes
        self._sent: deque[tuple[Work, Tensor]] = deque()

    def send(self, frame: HopFrame) -> None:
        """Post a frame. No more than ``ahead`` are under way, as many as the neighbour awaits."""
        message = frame.packed()
        assert message.numel() <= self._nbytes, "room was computed for the largest pass"
        if len(self._sent) >= self._ahead:
            self._sent.popleft()[0].wait()
        work = transport.send(message, self._to, self._group, Meter())
        self._sent.append((work, message))

    def close(self, failed: bool) -> None:
        """Meet the receives that the neighbour has posted ahead; wait unless something failed."""
        with contextlib.suppress(*([RuntimeError] if failed else [])):  # the neighbour has gone
            for _ in range(self._ahead):
                message = END.packed()
                work = transport.send(message, self._to, self._group, Meter())
                self._sent.append((work, message))
        while self._sent and not failed:
            self._sent.popleft()[0].wait()


class Incoming:
    """Frames from the global rank ``source``, of at most ``nbytes`` each."""

    def __init__(self, source: int, group: Group, ahead: int, nbytes: int) -> None:
        self._source, self._group = source, group
        self._found: queue.SimpleQueue[HopFrame | Exception] = queue.SimpleQueue()
        rooms = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(ahead)]
        self._posted = deque((self._post(room), room) for room in rooms)
        self._thread = threading.Thread(target=self._read, daemon=True, name="hybridcomp frames")
        self._thread.start()

    def _post(self, room: Tensor) -> Work:
        return transport.recv(room, self._source, self._group)

    def _read(self) -> None:
        try:
            while self._posted:
                work, room = self._posted.popleft()
                work.wait()
                frame = HopFrame.unpacked(room)
                if frame.said is not None:
                    length = frame.said["nbytes"]
                    frame = HopFrame(frame.said, frame.payload[:length].clone())
                    self._posted.append((self._post(room), room))
                self._found.put(frame)
        except Exception as problem:
            self._found.put(problem)

    def take(self) -> HopFrame:
        """Return the next frame. Raises where a rank of the operation has failed, or this link."""
        while True:
            try:
                found = self._found.get(timeout=LOOK_S)
            except queue.Empty:
                check_failed()
                continue
            if isinstance(found, Exception):
                check_failed()
                raise found
            return found

    def close(self, seconds: float | None = None) -> None:
        """Wait until the neighbour has met all receives; ``seconds``: at most."""
        self._thread.join(seconds)
