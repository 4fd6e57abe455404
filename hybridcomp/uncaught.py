"""A user's mistake ends a job with one line, on one rank, without a traceback.

``install`` puts ``show`` in front of ``sys.excepthook``. Errors of the configuration, of versions
and of ranks that differ say themselves what to do: a traceback through upstream and hybridcomp
would only hide that, on every rank again. ``HYBRIDCOMP_TRACEBACK=1`` shows it.

Rank 0 always speaks. Another rank keeps silent if rank 0 has said the same, which it learns by a
file among the temporary ones: the process group may not be there yet, or be gone. Between nodes the
rendezvous store tells the first rank of each. Whoever hears nothing within seconds speaks itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from hybridcomp.errors import AgreementError, ConfigError, SeamError
from hybridcomp.log import complain, rank

#: what a user can mend without reading code
MISTAKES = (ConfigError, AgreementError, SeamError)
#: environment variable that asks for tracebacks all the same
ENVIRONMENT = "HYBRIDCOMP_TRACEBACK"
#: seconds that a rank waits for another to say the same, and that such a file counts
WAIT_S, FRESH_S = 10.0, 60.0

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
    """The ``sys.excepthook`` of a process with hybridcomp."""
    if not isinstance(error, MISTAKES) or os.environ.get(ENVIRONMENT, "0") not in ("", "0"):
        _before(kind, error, traceback)
        return
    line = f"{kind.__name__}: {error}"
    if _speaks(line):
        whose = f" (rank {rank()})" if rank() else ""
        complain(f"{line}{whose}")


def _speaks(line: str) -> bool:
    """Whether this rank is the one that says ``line``; it then leaves word for the others."""
    note, key = _note(line), f"hybridcomp/said/{_digest(line)}"
    if rank() == 0:
        _tell_other_nodes(key)
    elif os.environ.get("LOCAL_RANK", "0") != "0":
        return not _comes(note)
    elif _said_by_rank_0(key):
        return False
    with contextlib.suppress(OSError):  # then others say it again
        note.touch()
    return True


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _note(line: str) -> Path:
    """The file that says that ``line`` was said: of this user, this launcher and this job."""
    job = (os.environ.get("MASTER_PORT"), os.environ.get("TORCHELASTIC_RUN_ID"))
    owner = os.getuid() if hasattr(os, "getuid") else 0
    name = f"hybridcomp-said-{_digest(owner, os.getppid(), *job, line)}"
    return Path(tempfile.gettempdir()) / name


def _comes(note: Path) -> bool:
    """Whether the file is there, or is within WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if time.time() - note.stat().st_mtime < FRESH_S:
                return True
        time.sleep(0.05)
    return False


def _store() -> Any:
    """The rendezvous store of the process group, None without one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.distributed_c10d._get_default_store()


def _tell_other_nodes(key: str) -> None:
    with contextlib.suppress(Exception):  # whatever the store raises: it only saves repetitions
        if (store := _store()) is not None:
            store.set(key, "1")


def _said_by_rank_0(key: str) -> bool:
    """Whether rank 0, on another node, says the same within WAIT_S."""
    try:
        store = _store()
        if store is not None:
            store.wait([key], timedelta(seconds=WAIT_S))
        return store is not None
    except Exception:
        return False  # silence, or a store that is gone
