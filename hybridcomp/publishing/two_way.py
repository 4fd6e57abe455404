"""A socket as a stream of versions, on both sides: receivers ask for full versions through it."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from hybridcomp.errors import PublishError
from hybridcomp.publishing.streams import ASK, FRAME, MARK, foreign_bytes, frame_head, frame_in


@contextmanager
def _connected() -> Iterator[None]:
    """Turn an error of a socket into one line."""
    try:
        yield
    except OSError as error:
        raise PublishError(
            f"the other side of the socket is gone ({error.strerror or error}): connect again, and "
            "make a new publisher and a new WeightReceiver"
        ) from None


class TwoWay:
    """A connected socket; the sender's has ``write``, the receiver's ``read``.

    The socket stays its owner's, who closes it. A request is one frame without bytes.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Hold ``connection``, which is to block."""
        self._socket = connection
        self._back = bytearray()  # the begin of a request

    def read(self, nbytes: int, /) -> bytes:
        """Return up to ``nbytes`` bytes; none at the end of the stream."""
        with _connected():
            return self._socket.recv(nbytes)

    def readinto(self, room: memoryview, /) -> int:
        """Receive into ``room``; return how many bytes, 0 at the end of the stream."""
        with _connected():
            return self._socket.recv_into(room)

    def write(self, data: memoryview | bytes, /) -> None:
        """Send all of ``data``."""
        with _connected():
            self._socket.sendall(data)

    def ask_full(self) -> None:
        """Ask the sender for a full version."""
        self.write(frame_head(ASK, 0, 0))

    def wants_full(self) -> bool:
        """Return whether a receiver has asked since the last call, without waiting for it."""
        while select.select([self._socket], [], [], 0)[0]:
            data = self.read(FRAME.size * 64)
            if not data:
                break  # the receiver has gone: writing says so
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
