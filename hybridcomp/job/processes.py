"""Describe the processes of the job's ranks, and check those on this host by /proc.

``peer_liveness`` collects the peers when the job begins; code that waits for a rank calls ``gone``.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar


@dataclass(frozen=True)
class Peer:
    """A rank and its process."""

    rank: int
    host: str
    space: str  # pid namespace and boot, within which process ids are unique
    pid: int
    began: str  # start time of the process, "" if unknown

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


class Known:
    """Ranks of the job, or of parts of it, once each has announced its process.

    ``job`` refers to the default process group of these ranks, since a process may initialize
    torch.distributed again, with other processes. ``parts`` holds the global ranks of each part of
    the job whose ranks have announced theirs; None stands for all ranks.
    """

    peers: Sequence[Peer] = ()
    parts: ClassVar[set[tuple[int, ...] | None]] = set()
    job: Callable[[], object] = staticmethod(lambda: None)


def myself(rank: int) -> Peer:
    status = stat(os.getpid())
    return Peer(rank, socket.gethostname(), space(), os.getpid(), status[1] if status else "")


def others() -> list[Peer]:
    """Return the known ranks that run in other processes."""
    here, mine = space(), os.getpid()
    return [peer for peer in Known.peers if peer.pid != mine or peer.space != here]


def gone(ranks: Collection[int], job: object) -> list[Peer]:
    """Return the peers of ``ranks`` whose process ran on this host and has ended.

    ``job``: the default process group that numbers the ranks.
    """
    if Known.job() is not job:
        return []
    return [peer for peer in others() if peer.rank in ranks and state(peer) == ENDED]


ENDED = "has ended"
STOPPED = "is stopped (SIGSTOP, or a debugger)"


def state(peer: Peer) -> str | None:
    """Return what is wrong with the process of ``peer``; None: nothing, or unknown."""
    if peer.space != space():
        return None
    status = stat(peer.pid)
    if status is None:
        try:
            os.kill(peer.pid, 0)
        except ProcessLookupError:
            return ENDED
        except OSError:
            pass
        return None
    if status[0] in "ZXx" or (peer.began and status[1] != peer.began):
        return ENDED
    return STOPPED if status[0] in "Tt" else None


def stat(pid: int) -> tuple[str, str] | None:
    """Read a process's state and start time from Linux; None if they cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], fields[19]


def space() -> str:
    """Return an identifier of the pid namespace and boot of this process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
