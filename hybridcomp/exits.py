"""How a rank ends on a mistake of its user: one line for the whole job, no traceback, one status.

Every rank meets the same mistake. Once the process group is up they count in its store who has come
so far, and the first one tells; before that the ranks of one node see each other by a name that
only one process may hold. Where neither is to be had every rank tells: a message too many is better
than none. ``HYBRIDCOMP_TRACEBACK=1`` shows the traceback instead, on every rank.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from hybridcomp.errors import AgreementError, ConfigError, HybridcompError, SeamError

#: exit status of a configuration that cannot act, as argparse uses it for bad arguments
BAD_INPUT = 2
#: environment variable that asks for tracebacks
TRACEBACK = "HYBRIDCOMP_TRACEBACK"
#: what a user has to mend; a CodecError may be a fault of ours or of the machine
MISTAKES: tuple[type[HybridcompError], ...] = (ConfigError, AgreementError, SeamError)
#: seconds for which the rank that told stays, so that others meet it
LINGER_S = 1.0

_names: list[socket.socket] = []  # held until the process ends


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """A user's mistake inside ends the process with ``BAD_INPUT``, told once for the job."""
    try:
        yield
    except MISTAKES as error:
        if wants_traceback():
            raise
        leave(f"hybridcomp: {error}")


def leave(text: str) -> NoReturn:
    """End this rank with ``BAD_INPUT``; ``text`` is told on stderr by the first that comes here."""
    tell(text)
    raise SystemExit(BAD_INPUT)


def tell(text: str) -> None:
    """Print ``text`` on stderr, on the first of the ranks that come here with it."""
    if _is_first(text):
        rank = os.environ.get("RANK")
        where = "" if rank in (None, "0") else f" (told by rank {rank})"
        print(f"{text}{where}", file=sys.stderr, flush=True)
    if _names:
        time.sleep(LINGER_S)


def wants_traceback() -> bool:
    """Whether the user asked for tracebacks."""
    return os.environ.get(TRACEBACK, "0") not in ("", "0")


def _is_first(text: str) -> bool:
    """Whether this rank is the one to tell ``text``; True where that cannot be known."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return True
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        with contextlib.suppress(Exception):  # the rank that holds the store may be gone
            return _first_in_store(dist, name)
    return _first_on_node(name)


def _first_in_store(dist: Any, name: str) -> bool:
    """By the process group's store, which every rank of the job reaches."""
    store = dist.PrefixStore("hybridcomp/exits", dist.distributed_c10d._get_default_store())
    store.set_timeout(timedelta(seconds=LINGER_S))
    number = store.add(name, 1)
    deadline = time.monotonic() + LINGER_S
    # the store may live in this process, and others are still to ask
    while store.add(name, 0) < dist.get_world_size() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(number == 1)


def _first_on_node(name: str) -> bool:
    """By a name of a socket, of ranks that one launcher started on this node (Linux)."""
    try:
        started = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
        held = socket.socket(socket.AF_UNIX)
        held.bind(f"\0hybridcomp-{os.getppid()}-{started}-{name}")
    except OSError as error:
        return error.errno != errno.EADDRINUSE  # held by the rank that tells; else: not to be had
    _names.append(held)
    return True
