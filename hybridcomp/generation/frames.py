"""Frames between neighbouring stages: a JSON header and the bytes of a hop, as one message.

A stage posts a receive ahead for every batch in flight, with room for the largest frame: gloo sends
only once the receiver is ready, so a hop then takes a single trip over the link. A thread waits for
the receives, so that the stage can notice failures on other ranks meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import Work

from hybridcomp.collectives import Group, Meter
from hybridcomp.collectives.wire import transport
from hybridcomp.errors import PeerError
from hybridcomp.job.agreement import LOOK_S
from hybridcomp.job.gates import check_failed

#: name of the operation, and of the block's key, in error messages
KEY = "generate"
#: payloads begin at multiples of this
ALIGNED = 16
#: seconds for which a rank waits after a failure: for its neighbour's error, or its own thread
ENDS_S = 5.0


@dataclass(frozen=True)
class HopFrame:
    """A message from one stage to the next, with hidden states.

    ``said`` is the header; None: the sender has ended; False: the sender has failed.
    """

    said: Any
    payload: Tensor

    def packed(self) -> Tensor:
        """Return the frame as one uint8 tensor on the CPU."""
        said = self.said and {**self.said, "nbytes": self.payload.numel()}
        text = json.dumps(said, separators=(",", ":")).encode()
        text = len(text).to_bytes(8, "little") + text
        text += b" " * (-len(text) % ALIGNED)
        head = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return torch.cat([head, self.payload.cpu()]) if self.payload.numel() else head

    @classmethod
    def unpacked(cls, received: Tensor) -> HopFrame:
        """Return the frame in ``received``, as a view that may have extra bytes at its end."""
        size = int(received[:8].view(torch.int64))
        said = json.loads(bytes(received[8 : 8 + size].tolist()))
        start = -(-(8 + size) // ALIGNED) * ALIGNED
        return cls(said, received[start:])


#: final frames of a link: after the last pass, and after a failure
END, FAILED = (
    HopFrame(said, torch.empty(0, dtype=torch.uint8, device="cpu")) for said in (None, False)
)


class Outgoing:
    """Sends frames to the global rank ``to``, and returns at once."""

    def __init__(
        self, to: int, group: Group, ahead: int, nbytes: int, extra: Callable[[Meter], object]
    ) -> None:
        """Send to ``to``; ``extra`` is called with the bytes of headers and final frames."""
        self._to, self._group, self._ahead, self._nbytes = to, group, ahead, nbytes
        self._sent: deque[tuple[Work, Tensor]] = deque()
        self._extra = extra

    def send(self, frame: HopFrame) -> None:
        """Post a frame; at most ``ahead`` frames are in flight, one per posted receive."""
        message = frame.packed()
        assert message.numel() <= self._nbytes, "room was computed for the largest pass"
        if len(self._sent) >= self._ahead:
            self._sent.popleft()[0].wait()
        self._post(message, message.numel() - frame.payload.numel())

    def _post(self, message: Tensor, extra: int) -> None:
        meter = Meter()
        work = transport.send(message, self._to, self._group, Meter())
        self._sent.append((work, message))
        meter.sent(extra)
        self._extra(meter)

    def close(self, failed: bool) -> None:
        """Send a final frame for each receive that the neighbour has posted.

        Waits until all frames are sent, but not after a failure.
        """
        with contextlib.suppress(*([RuntimeError] if failed else [])):  # the neighbour has gone
            for _ in range(self._ahead):
                message = (FAILED if failed else END).packed()
                self._post(message, message.numel())
        while self._sent and not failed:
            self._sent.popleft()[0].wait()


class Incoming:
    """Receives frames from the global rank ``source``, of at most ``nbytes`` each."""

    _left: ClassVar[list[threading.Thread]] = []  # threads that still read from failed links

    def __init__(self, source: int, group: Group, ahead: int, nbytes: int) -> None:
        self._source, self._group = source, group
        self._found: queue.SimpleQueue[HopFrame | Exception] = queue.SimpleQueue()
        while self._left:
            self._left.pop().join(ENDS_S)
        rooms = [torch.empty(nbytes, dtype=torch.uint8, device="cpu") for _ in range(ahead)]
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
                if frame.said:
                    length = frame.said["nbytes"]
                    frame = HopFrame(frame.said, frame.payload[:length].clone())
                    self._posted.append((self._post(room), room))
                self._found.put(frame)
        except Exception as problem:
            self._found.put(problem)

    def take(self) -> HopFrame:
        """Return the next frame. Raises if a rank of the operation or this link has failed."""
        while True:
            try:
                frame = self._found.get(timeout=LOOK_S)
            except queue.Empty:
                check_failed()
                continue
            if isinstance(frame, Exception):
                check_failed()
                raise frame
            if frame.said is not False:
                return frame
            until = time.monotonic() + ENDS_S
            while time.monotonic() < until:  # wait until the failed rank has sent its error
                check_failed()
                time.sleep(0.02)
            raise PeerError(f"{KEY}: rank {self._source} has failed")

    def close(self, failed: bool) -> None:
        """Wait until all posted receives are complete; do not wait after a failure."""
        if failed:
            self._left.append(self._thread)
        else:
            self._thread.join()
