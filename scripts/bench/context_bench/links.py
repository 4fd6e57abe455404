"""A rank asks the lab for another rate of the links, over a socket of the file system."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lab.layout import Rates

if TYPE_CHECKING:
    from typing_extensions import Self

#: where the socket is, for the ranks
VARIABLE = "CONTEXT_BENCH_LINKS"
NBYTES = 256


class Server:
    """The lab's end."""

    def __init__(self, listening: socket.socket, shape: Callable[[Rates], None]) -> None:
        self._listening, self._shape = listening, shape
        self._rank: socket.socket | None = None

    def serve(self, seconds: float) -> None:
        """Answer what a rank asks within about ``seconds``."""
        with contextlib.suppress(TimeoutError):
            if self._rank is None:
                self._listening.settimeout(seconds)
                self._rank = self._listening.accept()[0]
            self._rank.settimeout(seconds)
            asked = self._rank.recv(NBYTES)
            if not asked:  # it has hung up
                self._rank.close()
                self._rank = None
                return
            self._shape(Rates(json.loads(asked)))
            self._rank.sendall(b"ok")


@contextlib.contextmanager
def served(path: str, shape: Callable[[Rates], None]) -> Iterator[Server]:
    """A server at ``path`` that hands rates to ``shape``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(path)
        listening.listen(1)
        yield Server(listening, shape)


class Links:
    """A rank's end, which one rank uses; a context manager."""

    def __enter__(self) -> Self:
        self._socket: socket.socket | None = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()

    def shape(self, rate: int | None) -> None:
        """All links have ``rate`` bits a second, None: no limit, when this returns."""
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket.connect(os.environ[VARIABLE])
        self._socket.sendall(json.dumps(rate).encode())
        if self._socket.recv(NBYTES) != b"ok":
            raise SystemExit("RuntimeError: the bench ended before this rank did")
