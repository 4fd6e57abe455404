"""Find missing ranks, for the error of a rank that waited for their message.

gloo reports "Connection closed by peer" and "Timed out waiting" without a rank, and DeepSpeed's
launcher reports process ids. Each rank states once where it runs (``announce``). When a message
fails, a rank checks the processes on its own host, which is fast. For other hosts, it asks through
the rendezvous store which ranks have failed too: a rank that has ended, was stopped or is cut off
does not answer.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from hybridcomp.errors import ConfigError, HybridcompError, PeerError
from hybridcomp.job import processes
from hybridcomp.job.agreement import ENDING, failure_key, listed, start, tell, waiting
from hybridcomp.job.processes import Known, Peer
from hybridcomp.job.statements import absent

#: seconds within which running ranks on other hosts report that their message failed too
ROLL_CALL_S = 5.0
#: seconds to wait until a rank that has closed its connections is seen to have ended
LOOK_S = 5.0
_CPU = torch.device("cpu")
#: errors of torch.distributed's backends when a peer is gone or silent
_LOST = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset|refused)|broken pipe|timed out|socket|"
    r"process ?group|rendezvous",
    re.IGNORECASE,
)
#: errors of backends after a time-out with all connections intact
_SILENT = re.compile("timed out|time-?out", re.IGNORECASE)

_hooked = False


def announce(ranks: Sequence[int] | None = None) -> None:
    """State where this rank runs; a collective through the store, once for each part of the job.

    The result holds as long as the default process group, even after a detach. ``ranks``: global
    ranks of the part of the job that calls this, with this rank; None: all.
    """
    global _hooked
    job = dist.group.WORLD
    if Known.job() is not job:
        Known.peers, Known.parts, Known.job = (), set(), weakref.ref(job)
    part = None if ranks is None or len(ranks) == dist.get_world_size() else tuple(ranks)
    if not Known.parts & {None, part}:
        said = tell(asdict(_myself()), what="place", ranks=part)
        by_rank = {peer.rank: peer for peer in (*Known.peers, *(Peer(**peer) for peer in said))}
        Known.peers = tuple(by_rank[rank] for rank in sorted(by_rank))
        Known.parts.add(part)
        _prepare_last_words()
    if not _hooked:
        _hooked = True
        _hook()


def time_limit(group: dist.ProcessGroup | None = None) -> timedelta | None:
    """Return the time limit of a message: the default group's time-out; None without one.

    A gloo group that is created later, as by DeepSpeed, gets torch's default of 30 minutes,
    whatever ``init_process_group`` set. So the time-out of ``group``, the message's group, counts
    only if it differs from torch's default.
    """
    try:
        limit = _waits(dist.distributed_c10d._get_default_group())
        own = limit if group is None else _waits(group)
    except (AttributeError, RuntimeError, ValueError):  # the group does not use gloo
        return None
    return limit if own == dist.distributed_c10d.default_pg_timeout else own


def _waits(group: dist.ProcessGroup) -> timedelta:
    """Return the time-out of a gloo group."""
    limit: timedelta = group._get_backend(_CPU).options._timeout
    return limit


def limit_waits() -> None:
    """Apply the default group's time-out to upstream's groups that would wait longer.

    Call it again when upstream has created groups. Groups with an explicit time-out keep it: only
    those with torch's default are changed.
    """
    limit, c10d = time_limit(), dist.distributed_c10d
    change = getattr(dist, "set_timeout", getattr(c10d, "_set_pg_timeout", None))  # torch 2.14
    if limit is None or change is None:
        return
    unsaid = c10d.default_pg_timeout
    for group in list(c10d._world.pg_map):
        with contextlib.suppress(AttributeError, RuntimeError, ValueError):
            if _waits(group) == unsaid > limit:
                change(limit, group)


def _prepare_last_words() -> None:
    """Register this host's peers, so that a fatal signal's message can name ended ones."""
    try:
        last_words = importlib.import_module("hybridcomp.job._last_words")
    except ImportError:
        return  # not Linux
    here = processes.space()
    near = [peer for peer in processes.others() if peer.space == here]
    last_words.set(_me(), [(f"/proc/{peer.pid}/stat", peer.began, str(peer)) for peer in near])


def lost(error: BaseException, where: str = "") -> PeerError | None:
    """Return an error that names missing ranks, if ``error`` is about a message between ranks.

    Returns None for other errors. ``where``: the message, for example ``dp at step 12``.
    """
    if isinstance(error, HybridcompError) or not _is_about_messages(error):
        return None
    missing = _missing(patient=_SILENT.search(str(error)) is None)
    causes = "; ".join(missing or [_running()])
    return PeerError(f"{_me()}: {where or 'a message'} failed: {causes} ({_first_line(error)})")


def _running() -> str:
    """Return a sentence on ranks that run, and on those of which this rank knows nothing."""
    known = {peer.rank for peer in Known.peers}
    unknown = [rank for rank in range(_world()) if rank not in known]
    lacks = f", but rank(s) {listed(unknown)} have not said where they run" if unknown else ""
    return f"the processes of this host's ranks still run{lacks}"


def _is_about_messages(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None


def _missing(patient: bool) -> list[str]:
    """Return sentences about ranks that failed, ended, were stopped, or do not answer.

    ``patient``: a peer's connection broke, so wait up to LOOK_S for a process on this host to end.
    The kernel closes a process's sockets before it shows the process as ended; a rank that raises
    an error also closes its connections first.
    """
    if patient and (stated := _stated()):
        return stated
    others, here = processes.others(), processes.space()
    far = [peer for peer in others if peer.space != here]
    deadline = time.monotonic() + (LOOK_S if patient and len(far) < len(others) else 0.0)
    silent = [] if _disturbed() or not far else _silent(far)
    while not (disturbed := _disturbed()) and not silent and time.monotonic() < deadline:
        time.sleep(0.02)
    return disturbed or [f"{peer} does not answer" for peer in silent]


def _stated() -> list[str]:
    """Return the failure that a rank reported when it closed its connections (``ending``)."""
    failures: list[str] = []
    if not dist.is_initialized():
        return failures

    def look() -> None:
        with contextlib.suppress(RuntimeError, dist.DistError):
            key = failure_key(ENDING)
            if _store().check([key]):
                rank, words = json.loads(_store().get(key))
                failures.append(f"rank {rank} has failed ({words})")

    _ends_within(LOOK_S, look)
    return list(failures)


def _ends_within(seconds: float, ask: Callable[..., object], *args: object) -> bool:
    """Call ``ask`` in a thread, since a store on a stopped host never answers.

    Returns False if the call has not returned after ``seconds``.
    """
    thread = threading.Thread(target=ask, args=args, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _disturbed() -> list[str]:
    """Return sentences about ranks on this host that ended or were stopped."""
    return [f"{p} {state}" for p in processes.others() if (state := processes.state(p))]


def _silent(peers: Sequence[Peer]) -> list[Peer]:
    """Return the ``peers`` that do not report within ROLL_CALL_S that they have failed too."""
    silent: list[Peer] = []
    answers = _ends_within(ROLL_CALL_S + 1, _roll_call, peers, silent)
    host = [peer for peer in peers if peer.rank == 0]
    return host if not answers and host else list(silent)


def _roll_call(peers: Sequence[Peer], silent: list[Peer]) -> None:
    try:
        with waiting(_store(), ROLL_CALL_S) as whole:
            store = PrefixStore(f"hybridcomp/failed/{start()}", whole)
            store.set(str(dist.get_rank()), json.dumps(True))
            deadline = time.monotonic() + ROLL_CALL_S
            silent.extend(peers)
            while silent and time.monotonic() < deadline:
                time.sleep(0.2)
                missing = absent(store, [peer.rank for peer in silent])
                silent[:] = [peer for peer in silent if peer.rank in missing]
    except (RuntimeError, dist.DistError):
        silent[:] = [peer for peer in peers if peer.rank == 0]  # rank 0 usually hosts the store


def _store() -> Store:
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def _hook() -> None:
    """Name this rank, and missing ones, below the traceback of an uncaught error."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if isinstance(error, Exception) and not isinstance(error, ConfigError):
            print(f"[hybridcomp] {_last_words(error)}", file=sys.stderr, flush=True)

    sys.excepthook = hook


def _last_words(error: Exception) -> str:
    if isinstance(error, PeerError):
        return str(error)
    peer_error = lost(error, "a message of the training program or of upstream")
    if peer_error is not None:
        return str(peer_error)
    kind = type(error).__name__
    # torchrun kills the other ranks, often before they can name the missing one
    missing = _disturbed() if kind == "SignalException" else []
    return "; ".join([f"{_me()} fails: {kind}: {_first_line(error)}", *missing])


def _me() -> str:
    mine = _myself()
    return f"rank {mine.rank} of {_world()} (process {mine.pid} on {mine.host})"


def _world() -> int:
    """Return the number of ranks of the job, of which ``Known`` may hold only a part."""
    if dist.is_initialized():
        return dist.get_world_size()
    return len(Known.peers) or int(os.environ.get("WORLD_SIZE", "1"))


def _myself() -> Peer:
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    return processes.myself(rank)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
