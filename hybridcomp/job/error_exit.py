"""End a rank on a mistake of its user: one line for the job, no traceback, one exit status.

``install`` puts ``show`` in front of ``sys.excepthook``. The messages of configuration, version and
agreement errors say what to do; a traceback through upstream and hybridcomp on every rank would
only hide the message. ``HYBRIDCOMP_TRACEBACK=1`` shows the traceback.

Every rank meets the same mistake, but only one should print it. Once the process group is up, the
ranks count themselves in its store, and the first one prints. Before that, the ranks of one node
try to bind the same socket name, and the one that succeeds prints. If neither the store nor the
socket works, every rank prints: too many messages are better than none.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from hybridcomp.errors import AgreementError, ConfigError, HybridcompError, SeamError
from hybridcomp.job.environment import TRACEBACK

#: exit status for a configuration that cannot act; argparse uses it for bad arguments
BAD_INPUT = 2
#: errors that a user must fix; CodecError is absent, as it may be our fault or the machine's
MISTAKES: tuple[type[HybridcompError], ...] = (ConfigError, AgreementError, SeamError)
#: seconds for which the printing rank stays alive, so that others find it
LINGER_S = 3.0

_sockets: list[socket.socket] = []  # held until the process ends
#: hooks that ``install`` has replaced by ``show``, the newest last
_before: list[Callable[..., object]] = []


def install() -> None:
    """Show uncaught mistakes as one line from now on; harmless when called twice.

    If another hook has replaced ``show`` meanwhile, as that of ``init_process_group`` does,
    ``install`` puts ``show`` in front again, since that hook may not call ``show``. If it does,
    ``show`` passes the error on to the hook that was installed before.
    """
    if sys.excepthook is not show:
        _before.append(sys.excepthook)
        sys.excepthook = show


def uninstall() -> None:
    """Restore the previous hook, unless another one has replaced ``show``."""
    if sys.excepthook is show:
        sys.excepthook = _before.pop()


def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print a user's mistake in one line; pass other errors to the previous hook."""
    asked = os.environ.get(TRACEBACK, "0") not in ("", "0")
    if isinstance(error, MISTAKES) and not asked:
        tell(f"hybridcomp: {error}")
        raise SystemExit(BAD_INPUT)  # the interpreter uses it as the exit status
    hook = _before.pop() if _before else None
    try:  # pop the hook first: it may call this function again
        (hook or sys.__excepthook__)(kind, error, traceback)
    finally:
        if hook is not None:
            _before.append(hook)


def tell(text: str) -> None:
    """Print ``text`` on stderr, but only on the first rank that calls this with the same text.

    The other ranks wait until it is printed, since a launcher kills all ranks once one has ended.
    """
    meeting = _meeting(text)
    if not meeting.first and meeting.is_told():
        return
    rank = os.environ.get("RANK")
    where = "" if rank in (None, "0") else f" (told by rank {rank})"
    # torch.distributed replaces sys.stderr by a buffer around hooks older than its own
    print(f"{text}{where}", file=sys.__stderr__ or sys.stderr, flush=True)
    meeting.tell()


class _Alone:
    """Group of this rank alone, used if no other rank can be reached: this rank prints."""

    first = True

    def is_told(self) -> bool:
        """Return whether the first rank has printed within LINGER_S."""
        return False

    def tell(self) -> None:
        """Tell the other ranks that the line is printed, and wait until they have read it."""


def _meeting(text: str) -> _Alone:
    """Return the meeting of the ranks that call this with the same ``text``."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return _Alone()
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        with contextlib.suppress(Exception):  # the rank that holds the store may be gone
            return _InStore(distributed, name)
    try:
        return _OnNode(name)
    except OSError:
        return _Alone()


class _InStore(_Alone):
    """Meeting in the process group's store, which every rank of the job reaches."""

    def __init__(self, distributed: Any, name: str) -> None:
        from hybridcomp.job.agreement import start

        whole = distributed.distributed_c10d._get_default_store()
        self._store = distributed.PrefixStore(f"hybridcomp/uncaught/{start()}", whole)
        self._name, self._ranks = name, distributed.get_world_size()
        self.first = self._add(name, 1) == 1

    def _add(self, key: str, number: int) -> int:
        """Add to a number in the store, without changing the store's time-out for other code."""
        before = self._store.timeout
        self._store.set_timeout(timedelta(seconds=LINGER_S))
        try:
            return int(self._store.add(key, number))
        finally:
            self._store.set_timeout(before)

    def is_told(self) -> bool:
        return self._until(lambda: self._add(f"{self._name}/told", 0) > 0)

    def tell(self) -> None:
        """Tell the others, and stay until all have read it: this process may host the store."""
        with contextlib.suppress(Exception):
            self._add(f"{self._name}/told", 1)
        self._until(lambda: self._add(self._name, 0) >= self._ranks)

    def _until(self, done: Callable[[], bool]) -> bool:
        """Poll ``done`` for LINGER_S; return False after that, or if the store is gone."""
        deadline = time.monotonic() + LINGER_S
        with contextlib.suppress(Exception):
            while not done():
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.02)
            return True
        return False


class _OnNode(_Alone):
    """Meeting of the ranks that one launcher started on this node, by a socket name (Linux)."""

    def __init__(self, name: str) -> None:
        started = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
        self._address = f"\0hybridcomp-{os.getppid()}-{started}-{name}"
        self._socket = socket.socket(socket.AF_UNIX)
        _sockets.append(self._socket)
        try:
            self._socket.bind(self._address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:  # otherwise the printing rank holds the name
                raise
            self.first = False

    def is_told(self) -> bool:
        """Return whether the first rank prints within LINGER_S; it listens once it has printed."""
        deadline = time.monotonic() + LINGER_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asking:
                asking.connect(self._address)
                return True
            time.sleep(0.02)
        return False

    def tell(self) -> None:
        """Tell the others: listen for LINGER_S, so that they can connect."""
        with contextlib.suppress(OSError):  # the socket is unbound: the first rank never printed
            self._socket.listen(socket.SOMAXCONN)
        time.sleep(LINGER_S)
