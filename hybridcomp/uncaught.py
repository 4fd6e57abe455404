"""How a rank ends on a mistake of its user: one line for the job, no traceback, one status.

``install`` puts ``show`` in front of ``sys.excepthook``: errors of the configuration, of versions
and of ranks that differ say themselves what to do. A traceback through upstream and hybridcomp
would only hide that, on every rank again; ``HYBRIDCOMP_TRACEBACK=1`` shows it.

Every rank meets the same mistake. Once the process group is up they count in its store who has
come so far, and the first one tells; before that the ranks of one node see each other by a name
that only one process may hold. Where neither is to be had every rank tells: a message too many is
better than none.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from hybridcomp.errors import AgreementError, ConfigError, HybridcompError, SeamError

#: exit status of a configuration that cannot act, as argparse uses it for bad arguments
BAD_INPUT = 2
#: environment variable that asks for tracebacks
TRACEBACK = "HYBRIDCOMP_TRACEBACK"
#: what a user has to mend; a CodecError may be a fault of ours or of the machine
MISTAKES: tuple[type[HybridcompError], ...] = (ConfigError, AgreementError, SeamError)
#: seconds for which the rank that told stays, so that others meet it
LINGER_S = 3.0

_names: list[socket.socket] = []  # held until the process ends
_before = sys.excepthook


def install() -> None:
    """Show uncaught mistakes as one line from now on; harmless when called twice."""
    global _before
    if sys.excepthook is not show:
        _before, sys.excepthook = sys.excepthook, show


def uninstall() -> None:
    """Give the hook back, unless somebody has put another in front of it."""
    if sys.excepthook is show:
        sys.excepthook = _before


def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Tell a mistake; hand everything else to the hook that was there before."""
    asked = os.environ.get(TRACEBACK, "0") not in ("", "0")
    if isinstance(error, MISTAKES) and not asked:
        tell(f"hybridcomp: {error}")
        raise SystemExit(BAD_INPUT)  # the interpreter takes it as the process's status
    _before(kind, error, traceback)


def tell(text: str) -> None:
    """Print ``text`` on stderr, on the first of the ranks that come here with it."""
    if _is_first(text):
        rank = os.environ.get("RANK")
        where = "" if rank in (None, "0") else f" (told by rank {rank})"
        # torch.distributed puts a buffer in the place of sys.stderr around hooks older than its own
        print(f"{text}{where}", file=sys.__stderr__ or sys.stderr, flush=True)
    if _names:
        time.sleep(LINGER_S)


def _is_first(text: str) -> bool:
    """Whether this rank is the one to tell ``text``; True where that cannot be known."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return True
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        with contextlib.suppress(Exception):  # the rank that holds the store may be gone
            return _first_in_store(distributed, name)
    return _first_on_node(name)


def _first_in_store(distributed: Any, name: str) -> bool:
    """Ask the process group's store, which every rank of the job reaches."""
    whole = distributed.distributed_c10d._get_default_store()
    started = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # see agreement.start
    store = distributed.PrefixStore(f"hybridcomp/uncaught/{started}", whole)
    store.set_timeout(timedelta(seconds=LINGER_S))
    number = store.add(name, 1)
    deadline = time.monotonic() + LINGER_S
    # the store may live in this process, and others are still to ask
    while store.add(name, 0) < distributed.get_world_size() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(number == 1)


def _first_on_node(name: str) -> bool:
    """Ask by a socket's name among ranks that one launcher started on this node (Linux)."""
    try:
        started = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
        held = socket.socket(socket.AF_UNIX)
        held.bind(f"\0hybridcomp-{os.getppid()}-{started}-{name}")
    except OSError as error:
        return error.errno != errno.EADDRINUSE  # held by the rank that tells; else: not to be had
    _names.append(held)
    return True
