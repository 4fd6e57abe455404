"""Which ranks of the job are still there, for the message of one that waited for them in vain.

gloo says "Connection closed by peer" and "Timed out waiting", and names no rank; DeepSpeed's
launcher names process ids. Ranks state once where they run (``announce``). When a message fails, a
rank looks at the processes of its own host, which takes no time, and asks through the rendezvous
store who else has failed: a rank that has ended, was stopped or is cut off does not answer.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from hybridcomp.agreement import start, tell
from hybridcomp.errors import ConfigError, HybridcompError, PeerError

#: seconds that ranks of other hosts get to say that they have failed as well
ROLL_CALL_S = 5.0
_CPU = torch.device("cpu")
#: what torch.distributed's back ends say when a peer is gone or silent
_LOST = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset|refused)|broken pipe|timed out|socket|"
    r"process ?group|rendezvous",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Peer:
    """A rank, and the process that it runs in."""

    rank: int
    host: str
    space: str  # of process ids: the boot and the pid namespace
    pid: int
    began: str  # when the process began, "" where that is not known


class _Known:
    peers: Sequence[Peer] = ()
    hooked = False


def announce() -> None:
    """Let all ranks know where this one runs; the first time a collective through the store."""
    if not _Known.peers:
        said = tell(asdict(_myself()), what="place")
        _Known.peers = tuple(Peer(**peer) for peer in said)
    if not _Known.hooked:
        _Known.hooked = True
        _hook()
        _prepare_last_words()
    limit_waits()


def time_limit() -> timedelta | None:
    """How long a message may take: the time-out of the default group, None where it has none.

    A group that is made later gets torch's 30 minutes over gloo, whatever ``init_process_group``
    was told, and DeepSpeed sends through groups of its own.
    """
    try:
        backend = dist.distributed_c10d._get_default_group()._get_backend(_CPU)
        limit: timedelta = backend.options._timeout
    except (AttributeError, RuntimeError, ValueError):  # not over gloo
        return None
    return limit


def limit_waits() -> None:
    """Give the groups of this process, where they wait longer, the default group's time-out.

    To be called again when upstream has made groups.
    """
    limit = time_limit()
    change = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    if limit is None or change is None:
        return
    for group in list(dist.distributed_c10d._world.pg_map):
        with contextlib.suppress(AttributeError, RuntimeError, ValueError):
            if group._get_backend(_CPU).options._timeout > limit:
                change(limit, group)


def _prepare_last_words() -> None:
    """Let a signal that ends this rank say who is missing."""
    try:
        last_words = importlib.import_module("hybridcomp._last_words")
    except ImportError:
        return  # not Linux, or built from older sources
    me = _myself()
    near = [peer for peer in _Known.peers if peer.space == me.space and peer.pid != me.pid]
    last_words.set(_me(), [(f"/proc/{peer.pid}/stat", peer.began, _named(peer)) for peer in near])


def lost(error: BaseException, where: str = "") -> PeerError | None:
    """The error that names who is missing, where ``error`` is about a message between ranks.

    ``where``: which message, for example ``dp at step 12``. None for other errors.
    """
    if isinstance(error, HybridcompError) or not _is_about_messages(error):
        return None
    missing = _missing()
    found = "; ".join(missing) if missing else "no rank of this host is missing"
    return PeerError(f"{_me()}: {where or 'a message'} failed: {found} ({_first_line(error)})")


def _is_about_messages(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None


def _missing() -> list[str]:
    """Sentences about ranks that ended, were stopped, or do not answer."""
    me = _myself()
    others = [peer for peer in _Known.peers if peer.pid != me.pid or peer.space != me.space]
    found = [_shown(peer, state) for peer in others if (state := _state(peer, me)) is not None]
    far = [peer for peer in others if peer.space != me.space]
    if found or not far:
        return found
    return [_shown(peer, "does not answer") for peer in _silent(far)]


def _shown(peer: Peer, state: str) -> str:
    return f"{_named(peer)} {state}"


def _named(peer: Peer) -> str:
    return f"rank {peer.rank} (process {peer.pid} on {peer.host})"


def _state(peer: Peer, me: Peer) -> str | None:
    """What is wrong with the process of ``peer``, None where nothing is or cannot be seen."""
    if peer.space != me.space:
        return None
    stat = _stat(peer.pid)
    if stat is None:
        try:
            os.kill(peer.pid, 0)
        except ProcessLookupError:
            return "has ended"
        except OSError:
            return None
        return None
    if stat[0] in "ZXx" or (peer.began and stat[1] != peer.began):
        return "has ended"
    return "is stopped (SIGSTOP, or a debugger)" if stat[0] in "Tt" else None


def _stat(pid: int) -> tuple[str, str] | None:
    """State and time of the beginning of a process, as Linux shows them."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], fields[19]


def _silent(peers: Sequence[Peer]) -> list[Peer]:
    """Find those of ``peers`` that do not say within ROLL_CALL_S that they have failed too.

    In a thread: a store whose host was stopped never answers.
    """
    silent: list[Peer] = []
    thread = threading.Thread(target=_roll_call, args=(peers, silent), daemon=True)
    thread.start()
    thread.join(ROLL_CALL_S + 1)
    host = next(peer for peer in _Known.peers if peer.rank == 0)
    return [host] if thread.is_alive() and host in peers else list(silent)


def _roll_call(peers: Sequence[Peer], silent: list[Peer]) -> None:
    try:
        store = PrefixStore(f"hybridcomp/failed/{start()}", _store())
        store.set(str(dist.get_rank()), json.dumps(True))
        deadline = time.monotonic() + ROLL_CALL_S
        silent.extend(peers)
        while silent and time.monotonic() < deadline:
            time.sleep(0.2)
            silent[:] = [peer for peer in silent if not store.check([str(peer.rank)])]
    except (RuntimeError, dist.DistError):
        silent[:] = [peer for peer in peers if peer.rank == 0]  # usually the store's host


def _store() -> Store:
    store: Store = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(seconds=ROLL_CALL_S))
    return store


def _hook() -> None:
    """Name this rank, and who is missing, below the traceback of an error that nobody caught."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if isinstance(error, Exception) and not isinstance(error, ConfigError):
            print(f"[hybridcomp] {_last_words(error)}", file=sys.stderr, flush=True)

    sys.excepthook = hook


def _last_words(error: Exception) -> str:
    if isinstance(error, PeerError):
        return str(error)
    found = lost(error, "a message of the training program or of upstream")
    if found is not None:
        return str(found)
    kind = type(error).__name__
    # torchrun ends the ranks that are left, often while they are about to say who is missing
    missing = _missing() if kind == "SignalException" else []
    return "; ".join([f"{_me()} fails: {kind}: {_first_line(error)}", *missing])


def _me() -> str:
    mine = _myself()
    world = len(_Known.peers) or int(os.environ.get("WORLD_SIZE", "1"))
    return f"rank {mine.rank} of {world} (process {mine.pid} on {mine.host})"


def _myself() -> Peer:
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    stat = _stat(os.getpid())
    return Peer(rank, socket.gethostname(), _space(), os.getpid(), stat[1] if stat else "")


def _space() -> str:
    """What two processes share whose ids mean the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
