"""Create, find, enter and remove network namespaces, and read the counters of an interface."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.layout import INTERFACE, LabError

#: ``hclab-<pid>-<start time of that process>-...``: names the process that a lab belongs to
OWNED = re.compile(r"hclab-(\d+)-(\d+)-(?:sw|n\d+)")
NETNS = Path("/var/run/netns")
CLONE_NEWNET, CLONE_NEWUTS, PR_SET_PDEATHSIG = 0x40000000, 0x04000000, 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Traffic:
    """Bytes of an interface, Ethernet headers included."""

    sent: int
    received: int

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent - other.sent, self.received - other.received)


def check_machine() -> None:
    """Raise LabError, which says what is missing, if no lab can be built here."""
    if not sys.platform.startswith("linux"):
        raise LabError(f"netlab: expected Linux with network namespaces, found {sys.platform}")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise LabError(
            f"netlab: expected {' and '.join(missing)} on PATH, found nothing; install iproute2"
        )
    if os.geteuid() != 0:
        raise LabError(
            "netlab: making network namespaces takes root, and this is user "
            f"{os.geteuid()}; run it with sudo, or as root in a container with CAP_SYS_ADMIN and "
            "CAP_NET_ADMIN"
        )


def command(words: Sequence[str]) -> str:
    """Run ``words``; return stdout. Raises LabError with its stderr."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(
            f"netlab: `{' '.join(words)}` failed: {done.stderr.strip() or done.returncode}; the "
            "kernel needs namespaces, veth, bridge and the tbf queue"
        )
    return done.stdout


def own_prefix() -> str:
    """Return the prefix of the namespaces of this process."""
    return f"hclab-{os.getpid()}-{started(os.getpid())}-"


def started(pid: int) -> int | None:
    """Return the start of process ``pid`` in clock ticks since boot, None if it has ended.

    It tells a reused process id from the first process. Source: proc(5), fields 3 and 22 of stat.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return int(fields[19]) if fields[0] not in "ZX" else None


def abandoned(names: Sequence[str], start: Callable[[int], int | None] = started) -> list[str]:
    """Return the ``names`` that belong to a lab whose process has ended."""
    found = [(name, OWNED.fullmatch(name)) for name in names]
    return [name for name, match in found if match and start(int(match[1])) != int(match[2])]


def present() -> list[str]:
    """Return the named network namespaces of this machine."""
    return sorted(path.name for path in NETNS.iterdir()) if NETNS.is_dir() else []


def remove(names: Sequence[str]) -> None:
    """Kill what runs inside the namespaces, and remove them with their links."""
    for name in names:
        with contextlib.suppress(LabError):
            for pid in command(["ip", "netns", "pids", name]).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
    for name in names:
        with contextlib.suppress(LabError):
            command(["ip", "netns", "del", name])


def sweep() -> list[str]:
    """Remove the namespaces of killed labs; return their names."""
    names = abandoned(present())
    remove(names)
    return names


def counters(name: str, interface: str = INTERFACE) -> Traffic:
    """Read the traffic of ``interface`` in namespace ``name`` from the kernel's counters."""
    found = command(["ip", "-n", name, "-s", "-j", "link", "show", "dev", interface])
    stats = json.loads(found)[0]["stats64"]
    return Traffic(int(stats["tx"]["bytes"]), int(stats["rx"]["bytes"]))


def entry(name: str, host: str, cores: Sequence[int], alone: bool) -> Callable[[], None]:
    """Return the ``preexec_fn`` of a child that runs in namespace ``name`` as machine ``host``.

    The child is pinned to ``cores`` and ends with the lab. ``alone``: every rank has a core; then
    the child runs as SCHED_BATCH, so that a waking thread does not preempt the running one. Unlike
    real links, the lab's deliver before ``send`` returns: gloo's thread wakes while the sender
    holds the connection's lock, and would spin on the sender's core for a time slice, 3 to 4 ms of
    every other small message. On shared cores SCHED_BATCH would make ranks wait for each other.
    """

    def enter() -> None:
        # only system calls here: between fork and exec nothing may take a lock
        with open(NETNS / name, "rb", buffering=0) as namespace:
            _call(_libc.setns(namespace.fileno(), CLONE_NEWNET))
        _call(_libc.unshare(CLONE_NEWUTS))
        socket.sethostname(host)
        os.sched_setaffinity(0, cores)
        policy = os.SCHED_BATCH if alone else os.SCHED_OTHER
        os.sched_setscheduler(0, policy, os.sched_param(0))
        end_with_parent()

    return enter


def end_with_parent() -> None:
    """Ask the kernel to kill this child with its parent; called before its program starts."""
    _call(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def _call(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
