"""Namespaces: who made them, removing them, entering one, and the counters of its interface."""

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

#: ``hclab-<pid>-<start time of that process>-...``: a lab belongs to a running process or to none
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
    """Raise LabError where no lab can be built, saying what is missing."""
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
    """Run ``words``; what it printed. Raises LabError with what it complained about."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(
            f"netlab: `{' '.join(words)}` failed: {done.stderr.strip() or done.returncode}; the "
            "kernel needs namespaces, veth, bridge and the tbf queue"
        )
    return done.stdout


def own_prefix() -> str:
    """Return the prefix of the namespaces of this process."""
    return f"hclab-{os.getpid()}-{_started(os.getpid())}-"


def _started(pid: int) -> int | None:
    """The start of process ``pid`` in clock ticks since boot, None where it ended (zombies did).

    A number that is used again belongs to another process. Source: proc(5), fields 3, 22 of stat.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return int(fields[19]) if fields[0] not in "ZX" else None


def abandoned(names: Sequence[str], started: Callable[[int], int | None] = _started) -> list[str]:
    """Return the ``names`` that belong to a lab whose process has ended."""
    found = [(name, OWNED.fullmatch(name)) for name in names]
    return [name for name, match in found if match and started(int(match[1])) != int(match[2])]


def present() -> list[str]:
    """Return the named network namespaces of this machine."""
    return sorted(path.name for path in NETNS.iterdir()) if NETNS.is_dir() else []


def remove(names: Sequence[str]) -> None:
    """Remove namespaces and end what still runs inside; their links go with them."""
    for name in names:
        with contextlib.suppress(LabError):
            for pid in command(["ip", "netns", "pids", name]).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
    for name in names:
        with contextlib.suppress(LabError):
            command(["ip", "netns", "del", name])


def sweep() -> list[str]:
    """Remove what labs left behind that were killed; returns the namespaces."""
    names = abandoned(present())
    remove(names)
    return names


def counters(name: str, interface: str = INTERFACE) -> Traffic:
    """Read the traffic of ``interface`` in namespace ``name`` from the kernel's counters."""
    found = command(["ip", "-n", name, "-s", "-j", "link", "show", "dev", interface])
    stats = json.loads(found)[0]["stats64"]
    return Traffic(int(stats["tx"]["bytes"]), int(stats["rx"]["bytes"]))


def entry(name: str, host: str, cores: Sequence[int], alone: bool) -> Callable[[], None]:
    """Return what a child calls before its program starts: it enters namespace ``name`` as machine
    ``host``, on ``cores``, and ends when the lab ends.

    ``alone``: there is a core for every rank. Then it is scheduled as SCHED_BATCH: a thread that
    wakes waits until the running one sleeps. These links answer before ``send`` has returned, which
    no real one does, so gloo's thread wakes while the sender still holds the lock of the
    connection, and polls for that in a loop. On the sender's own core it does so for a whole time
    slice, 3 to 4 ms of every other small message. Where ranks share a core each would wait for the
    other's slices instead.
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
    """Have the kernel kill this child with its parent; a child calls it before its program."""
    _call(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def _call(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
