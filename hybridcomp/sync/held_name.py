"""Hold an island's name in a run, so that no second living island takes it.

At the rendezvous stands by each name which process has it, and a counter that grows while it lives.
Whoever wants a name that is taken finds out whether that process still lives:

* On the same machine it looks for the process. One that does not end, be it stopped, lives, and so
  does one of another user of which the machine tells nothing but that it is there (``hidepid``).
* Elsewhere it watches the counter for ``WATCH_S``. A process whose machine is cut off for as long
  counts as ended.

A name is released when its island leaves, and is free again once its process has ended. A stopped
island whose name was taken meanwhile finds that out when it joins again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import util
from pathlib import Path
from typing import Any

from hybridcomp.errors import AgreementError, PeerError
from hybridcomp.job.waits import awaited, unsaid
from hybridcomp.sync.store_line import StoreLine

KEY = "compression.sync.islands.name"
#: seconds between two signs of life, and for which others look for one
BEAT_S, WATCH_S = 2.0, 20.0
PROC = Path("/proc")
#: when a process was started that cannot be looked at
HIDDEN = "hidden"
#: places in /proc/<pid>/stat behind the name: state, and when the process was started
_STATE, _BEGAN = 0, 19


class HeldName:
    """Name of this process's island; only its first rank holds one."""

    def __init__(self, line: StoreLine, name: str, say: Callable[..., object] = unsaid) -> None:
        """Hold nothing yet; ``line`` is used by the caller's thread alone, ``say`` by ``take``."""
        pid = os.getpid()
        self.name, self._say = name, say
        self._line, self._place = line, f"holders/{name}"
        self._own = {
            "id": secrets.token_hex(8), "host": socket.gethostname(), "pid": pid,
            "machine": _machine(), "began": _began(pid),
            "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        }  # fmt: skip
        self._text = json.dumps(self._own)
        self._ended = threading.Event()
        self._beating: threading.Thread | None = None

    def take(self) -> None:
        """Claim the name, unless already held, and start to signal that the island lives.

        Raises AgreementError where another living island has it, which is found out in ``BEAT_S``,
        and in ``WATCH_S`` where it was stopped; PeerError where the rendezvous does not answer.
        """
        while (held := self._line.first(self._place, self._text)) != self._text.encode():
            other = json.loads(held)
            if self._lives(other):
                raise AgreementError(
                    f"{KEY}: found {self.name!r}, which a living island has, {_words(other)}, "
                    f"since {other['since']}; this one is {_words(self._own)}. Give each island a "
                    "name of its own, or end the other one"
                )
            self._line.swap(self._place, held.decode(), self._text)
            self._line.drop(_beats(other))
        if self._beating is None:
            self._beating = threading.Thread(
                target=self._beat, name="hybridcomp island lives", daemon=True
            )
            self._beating.start()
            # as for the threads of the transfer
            self._net = util.Finalize(None, self._stop, exitpriority=-1)

    def release(self) -> None:
        """Release the name; harmless when called twice, never raises."""
        if self._beating is None:
            return
        self._net.cancel()
        self._stop()
        self._beating = None
        with contextlib.suppress(PeerError):  # gone with the store
            if self._line.get(self._place) == self._text.encode():
                self._line.drop(self._place)
            self._line.drop(_beats(self._own))

    def _lives(self, other: Mapping[str, Any]) -> bool:
        """Return whether the process ``other`` lives; see the module."""
        here = bool(other["machine"]) and other["machine"] == _machine()
        before = self._line.get(_beats(other))

        def look() -> str | None:
            if here and _began(other["pid"]) not in (other["began"], HIDDEN):
                return "ended"
            return "lives" if self._line.get(_beats(other)) != before else None

        def notice(waited: float) -> None:
            self._say(
                f"sync: the name {self.name!r} is that of {_words(other)}; looks for {WATCH_S:g} s "
                f"whether that lives, {waited:.0f} s so far"
            )

        found = awaited(look, WATCH_S, notice)
        return found == "lives" or (here and found is None)

    def _beat(self) -> None:
        """Signal that the island lives, until it ends or another island holds its name."""
        while not self._ended.is_set():
            with contextlib.suppress(PeerError):  # whoever carries messages says so
                line = self._line.again()
                while not self._ended.wait(BEAT_S):
                    if line.get(self._place) != self._text.encode():
                        return
                    line.add(_beats(self._own), 1)
            self._ended.wait(BEAT_S)

    def _stop(self) -> None:
        self._ended.set()
        if self._beating is not None:
            self._beating.join(BEAT_S)


def _beats(who: Mapping[str, Any]) -> str:
    return f"beats/{who['id']}"


def _words(who: Mapping[str, Any]) -> str:
    return f"process {who['pid']} on {who['host']}"


@functools.cache
def _machine() -> str:
    """Return an identifier of this boot and process-id namespace; "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return ""


def _began(pid: int) -> str | None:
    """Return when a process of this machine started, in ticks; None: it has ended.

    HIDDEN where it is there and cannot be looked at.
    """
    try:
        rest = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return None if rest[_STATE] in "ZX" else rest[_BEGAN]
    except OSError:
        pass
    with contextlib.suppress(PermissionError):  # what the kernel says of another user's process
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
    return HIDDEN
