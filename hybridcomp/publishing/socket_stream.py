"""Use a socket as a stream of versions; the receiver requests full versions through it."""

from __future__ import annotations

import errno
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from hybridcomp.errors import PublishError
from hybridcomp.publishing.streams import ASK, FRAME, MARK, foreign_bytes, frame_head, frame_in

T = TypeVar("T")
#: default seconds for which the other side may read nothing
STILL_S = 60.0
#: upper limit of these seconds: poll takes milliseconds in 32 bits
MOST_STILL_S = 1e6
#: most bytes that are passed to a socket at once
MOST_SENT = 1 << 22


@contextmanager
def _connected() -> Iterator[None]:
    """Turn socket errors into one line."""
    try:
        yield
    except OSError as error:
        raise PublishError(
            f"the other side of the socket is gone ({error.strerror or error}): connect again, and "
            "make a new publisher and a new WeightReceiver"
        ) from None


def is_plain_socket(value: object) -> bool:
    """Return whether ``TwoWay`` takes a socket; with TLS it is a stream with ``read`` and
    ``write``.
    """
    return isinstance(value, socket.socket) and not isinstance(value, ssl.SSLSocket)


class TwoWay:
    """A connected socket, on which the sender uses ``write`` and the receiver ``read``.

    The socket's owner closes it. Its own timeout does not count: a version that comes slowly would
    be lost. A request for a full version is one frame without bytes.
    """

    def __init__(self, connection: socket.socket, still_s: float = STILL_S) -> None:
        """Hold ``connection``; ``still_s``: longest time that the other side may read nothing."""
        self._socket, self._still_s = connection, still_s
        self._back = bytearray()  # beginning of a request
        self._asking = b""  # rest of a request that was not sent yet

    def read(self, nbytes: int, /) -> bytes:
        """Wait for up to ``nbytes`` bytes and return them; none at the end of the stream."""
        return self._received(lambda: self._socket.recv(nbytes))

    def readinto(self, room: memoryview, /) -> int:
        """Wait for bytes, into ``room``; return how many, 0 at the end of the stream."""
        return self._received(lambda: self._socket.recv_into(room))

    def _received(self, receive: Callable[[], T]) -> T:
        with _connected():
            while True:
                try:
                    return receive()
                except (BlockingIOError, TimeoutError) as error:
                    if error.errno == errno.ETIMEDOUT:  # of the connection, not of the socket
                        raise
                self._is_ready(select.POLLIN, None)

    def write(self, data: memoryview | bytes, /) -> int:
        """Send as much of ``data`` as the socket takes, at least one byte; return how many bytes.

        Raises PublishError if the other side accepts nothing for ``still_s``.
        """
        end, some = time.monotonic() + self._still_s, memoryview(data)[:MOST_SENT]
        with _connected():
            while self._is_ready(select.POLLOUT, max(0.0, end - time.monotonic())):
                try:  # a blocking socket would wait until it has taken everything
                    return self._socket.send(some, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    if time.monotonic() >= end:
                        break
                    time.sleep(0.001)
        raise PublishError(
            f"the other side of the socket has taken nothing for {self._still_s:g} s (still_s); "
            "look why it stands still: once it goes on, so does the next version"
        )

    def takes_bytes(self) -> bool:
        """Return whether the socket currently accepts bytes."""
        with _connected():
            return self._is_ready(select.POLLOUT, 0.0)

    def _is_ready(self, event: int, seconds: float | None) -> bool:
        """Wait for ``event`` on the socket, or its end; None: without a limit."""
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(None if seconds is None else seconds * 1e3))

    def ask_full(self) -> None:
        """Ask the sender for a full version."""
        self._asking = self._asking or frame_head(ASK, 0, 0)
        while self._asking:
            self._asking = self._asking[self.write(self._asking) :]

    def wants_full(self) -> bool:
        """Return whether a receiver has sent a request since the last call, without waiting."""
        while self._is_ready(select.POLLIN, 0.0):
            data = self.read(FRAME.size * 64)
            if not data:
                break  # the receiver is gone, which the next write will report
            self._back += data
        count = len(self._back) // FRAME.size
        for begin in range(0, len(self._back), FRAME.size):
            head = bytes(self._back[begin : begin + FRAME.size])
            is_begun = len(head) < FRAME.size and head[: len(MARK)] == MARK[: len(head)]
            found = None if len(head) < FRAME.size else frame_in(head)
            if not is_begun and (found is None or found.kind != ASK):
                raise foreign_bytes(head, "give publish a socket to a WeightReceiver")
        del self._back[: count * FRAME.size]
        return count > 0
