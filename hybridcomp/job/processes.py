"""Where the ranks of the job run, and what /proc says of those of this host.

``presence`` learns the peers when the job begins; whoever waits for a rank asks ``gone`` about it.
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
    """A rank, and the process that it runs in."""

    rank: int
    host: str
    space: str  # of process ids: the boot and the pid namespace
    pid: int
    began: str  # when the process began, "" where that is not known

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


class Known:
    """The ranks of the job, or of parts of it, once each has stated where it runs.

    ``job`` refers to the default process group that they are the ranks of: a process may start
    torch.distributed anew, with other processes. ``parts`` are the global ranks of each part whose
    ranks have spoken to each other, None: all ranks.
    """

    peers: Sequence[Peer] = ()
    parts: ClassVar[set[tuple[int, ...] | None]] = set()
    job: Callable[[], object] = staticmethod(lambda: None)


def myself(rank: int) -> Peer:
    """Describe this process, which is ``rank``."""
    found = stat(os.getpid())
    return Peer(rank, socket.gethostname(), space(), os.getpid(), found[1] if found else "")


def others() -> list[Peer]:
    """Return the known ranks that run in other processes."""
    here, mine = space(), os.getpid()
    return [peer for peer in Known.peers if peer.pid != mine or peer.space != here]


def gone(ranks: Collection[int], job: object) -> list[Peer]:
    """Find those of ``ranks`` whose process ran on this host and has ended.

    ``job``: the default process group that the ranks are counted in.
    """
    if Known.job() is not job:
        return []
    return [peer for peer in others() if peer.rank in ranks and state(peer) == ENDED]


ENDED = "has ended"
STOPPED = "is stopped (SIGSTOP, or a debugger)"


def state(peer: Peer) -> str | None:
    """Say what is wrong with the process of ``peer``, None where nothing is or cannot be seen."""
    if peer.space != space():
        return None
    found = stat(peer.pid)
    if found is None:
        try:
            os.kill(peer.pid, 0)
        except ProcessLookupError:
            return ENDED
        except OSError:
            pass
        return None
    if found[0] in "ZXx" or (peer.began and found[1] != peer.began):
        return ENDED
    return STOPPED if found[0] in "Tt" else None


def stat(pid: int) -> tuple[str, str] | None:
    """Read the state of a process and when it began, as Linux shows them."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], fields[19]


def space() -> str:
    """Name what two processes share whose ids mean the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
