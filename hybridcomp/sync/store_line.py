"""One rank's connection to the islands' rendezvous, torch's TCPStore; every call has a time-out.

A store whose process was stopped, or whose host is cut off, does not answer, and torch waits for
some answers without a limit. So each ``StoreLine`` sends requests from a thread of its own. A
request that takes too long raises an error that names the rendezvous, and its thread is abandoned.
The thread is started early, since Python 3.12 starts no thread while the process ends. Large values
are cut into pieces.
"""

from __future__ import annotations

import functools
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError, HybridcompError, PeerError
from hybridcomp.job.statements import PIECE_NBYTES
from hybridcomp.job.waits import NOTICE_S, awaited, unsaid

T = TypeVar("T")
KEY = "compression.sync.islands.rendezvous"
#: seconds that one request may take, even for a piece of PIECE_NBYTES over a slow link
REQUEST_S = 60.0
#: head of a piece: the value's mark, the piece's index, the number of pieces
_HEAD = struct.Struct("<qII")
TODO = "start it again with `hybridcomp rendezvous`, and the islands from their checkpoints"


class StoreLine:
    """A connection to the store at ``host`` and ``port``.

    Args:
        connect_s: seconds within which the rendezvous must first answer.
        request_s: seconds that a request may take.
        say: tells the user of a long wait for the first answer.
        known: whether the rendezvous has answered this process before.

    All methods raise PeerError, in one line that names the rendezvous, if it does not answer.
    Creating a process's first line raises ConfigError instead, since the run has not begun.
    """

    def __init__(
        self,
        host: str,
        port: int,
        connect_s: float = 60.0,
        request_s: float = REQUEST_S,
        say: Callable[..., object] = unsaid,
        known: bool = False,
    ) -> None:
        self.address, self._request_s = f"tcp://{host}:{port}", request_s
        self._made_with, self._known = (
            (host, port, min(connect_s, request_s), request_s, say),
            known,
        )
        self._start = f"start `hybridcomp rendezvous --port {port}` on that host first"
        # requests for the thread
        self._requests: SimpleQueue[Callable[[], None] | None] | None = None
        began = time.monotonic()
        self._await_listener(host, port, connect_s, say)
        left_s = max(1.0, connect_s - time.monotonic() + began)
        limit = timedelta(seconds=left_s)
        self._store: Any = self._within(
            left_s,
            lambda: TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit),
        )
        self._store.set_timeout(timedelta(seconds=request_s / 2))
        self._known = True

    def again(self) -> StoreLine:
        """Return another connection to the same store, for another thread."""
        return type(self)(*self._made_with, known=True)

    def set(self, key: str, value: bytes | str) -> None:
        """Set ``key``."""
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes | None:
        """Return the value of ``key``; None if it is not set."""
        return self._ask(lambda: self._get(key))

    def has(self, *keys: str) -> bool:
        """Return whether all ``keys`` are set."""
        return self._ask(lambda: bool(self._store.check(list(keys))))

    def first(self, key: str, value: str) -> bytes:
        """Set ``key`` unless it is set; return its value, the same for every caller."""
        return self._ask(lambda: bytes(self._store.compare_set(key, "", value)))

    def swap(self, key: str, before: str, value: str) -> None:
        """Set ``key`` if its value is ``before``."""
        self._ask(lambda: self._store.compare_set(key, before, value))

    def add(self, key: str, amount: int) -> int:
        """Add to the number at ``key``, initially 0; return the sum."""
        return self._ask(lambda: int(self._store.add(key, amount)))

    def drop(self, key: str) -> bool:
        """Delete ``key``; return whether it existed."""
        return self._ask(lambda: bool(self._store.delete_key(key)))

    # values of any size

    def put(self, key: str, mark: int, data: bytes | memoryview) -> None:
        """Set ``key`` to ``data`` in pieces that carry ``mark``; on return the store has them."""
        view = memoryview(data)
        count = max(1, -(-len(view) // PIECE_NBYTES))
        for index in range(count):
            piece = view[index * PIECE_NBYTES : (index + 1) * PIECE_NBYTES]
            self.set(f"{key}/{index}", _HEAD.pack(mark, index, count) + bytes(piece))
        # when it answers, the store has processed this line's earlier requests
        self.has(f"{key}/{count - 1}")

    def take(self, key: str, mark: int) -> bytearray | None:
        """Return the data ``put`` with ``mark``; None if it is missing or was overwritten.

        Takes one round trip per piece, plus two.
        """
        piece, found, index, count = self.get(f"{key}/0"), bytearray(), 0, 1
        while piece is not None and len(piece) >= _HEAD.size:
            of, at, count = _HEAD.unpack_from(piece)
            if (of, at) != (mark, index):
                return None
            found += memoryview(piece)[_HEAD.size :]
            index += 1
            if index == count:
                return found
            names = [f"{key}/{one}" for one in range(index, count)]
            if index == 1 and not self.has(*names):
                return None
            piece = self._ask(functools.partial(self._get_present, names[0]))
        return None

    def drop_pieces(self, key: str) -> None:
        """Delete all pieces of a ``put``."""
        index = 0
        while self.drop(f"{key}/{index}"):
            index += 1

    # a list to which everybody may append

    def append(self, name: str, value: str) -> int:
        """Append ``value``, which must be unique, to the list ``name``; return its index."""
        index = self.length(name)
        while self.first(f"{name}/{index}", value) != value.encode():
            index += 1
        return index

    def length(self, name: str) -> int:
        """Return the length of a list; bisection finds it, since a list has no gaps."""
        low, high = 0, 1
        while self.has(f"{name}/{high - 1}"):
            low, high = high, 2 * high
        while low < high - 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.has(f"{name}/{middle - 1}") else (low, middle)
        return low

    # inside

    def _get(self, key: str) -> bytes | None:
        return self._get_present(key) if self._store.check([key]) else None

    def _get_present(self, key: str) -> bytes | None:
        """Return the value of a key that existed; None if it was deleted meanwhile."""
        try:
            return bytes(self._store.get(key))
        except dist.DistNetworkError:
            raise
        except dist.DistStoreError:  # deleted meanwhile
            return None

    def _ask(self, work: Callable[[], T]) -> T:
        return self._within(self._request_s, work)

    def _within(self, seconds: float, work: Callable[[], T]) -> T:
        """Run ``work`` on the connection's thread and return its result within ``seconds``."""
        result: list[T] = []
        problem: list[Exception] = []
        done = threading.Event()

        def run() -> None:
            try:
                result.append(work())
            except Exception as error:
                problem.append(error)
            done.set()

        self._thread().put(run)
        done.wait(seconds)
        if result:
            return result[0]
        if problem:
            words = (str(problem[0]).strip() or type(problem[0]).__name__).splitlines()[0][:200]
            # torch's error text would be pages long
            raise self._gone(f"does not answer ({words})") from None
        self._end()  # the thread ends once the request does, if ever
        self._requests = None
        raise self._gone(f"has not answered for {seconds:g} s")

    def _thread(self) -> SimpleQueue[Callable[[], None] | None]:
        """Return the queue from which the line's thread takes requests until the line ends."""
        if self._requests is None:
            requests: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
            thread = threading.Thread(
                target=_do, args=(requests,), name="hybridcomp rendezvous", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                raise self._gone(f"cannot be asked ({error})") from error
            self._requests, self._end = requests, weakref.finalize(self, requests.put, None)
            self._end.atexit = False
        return self._requests

    def _await_listener(
        self, host: str, port: int, seconds: float, say: Callable[[str], object]
    ) -> None:
        """Return once the address accepts connections; else torch would log a screenful."""
        problem: OSError | None = None

        def look() -> bool | None:
            nonlocal problem
            try:
                limit = min(max(0.1, seconds), NOTICE_S)
                socket.create_connection((host, port), timeout=limit).close()
            except OSError as error:
                problem = error
                return None
            return True

        def notice(waited: float) -> None:
            say(
                f"sync: nobody has listened at {self.address} for {waited:.0f} s ({problem}); "
                f"{TODO if self._known else self._start}. Waits {seconds:g} s in all"
            )

        if awaited(look, seconds, notice) is None:
            raise self._gone(f"was not there for {seconds:g} s ({problem})") from problem

    def _gone(self, words: str) -> HybridcompError:
        if self._known:
            return PeerError(f"{KEY}: the rendezvous at {self.address} {words}; {TODO}")
        todo = f"the rendezvous {words}: {self._start}, or correct host and port"
        return ConfigError(KEY, Shown(self.address), todo)


def _do(requests: SimpleQueue[Callable[[], None] | None]) -> None:
    """Serve requests until None comes; keep none, since that would hold the connection open."""
    while (request := requests.get()) is not None:
        request()
        del request
