"""Hold an island's name in a run, so that no second living island takes it.

The rendezvous stores for each name the process that holds it, and a counter that grows while that
process lives. An island that wants a taken name finds out whether the holding process still lives:

* On the same machine it looks for the process. A process that exists counts as alive, even if it is
  stopped, or belongs to another user and cannot be inspected (``hidepid``).
* On another machine it watches the counter for ``WATCH_S``. A process whose machine is cut off for
  that long counts as ended.

A name is released when its island leaves, and is free again once its process has ended. A stopped
island whose name was taken meanwhile learns that when it joins again.
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
#: seconds between two signs of life, and seconds for which another island waits for a sign
BEAT_S, WATCH_S = 2.0, 20.0
PROC = Path("/proc")
#: start time of a process that cannot be inspected
HIDDEN = "hidden"
#: indices of fields in /proc/<pid>/stat after the name: state, and start time
_STATE, _BEGAN = 0, 19


class HeldName:
    """The name of this process's island; only its first rank holds one."""

    def __init__(self, line: StoreLine, name: str, say: Callable[..., object] = unsaid) -> None:
        """Hold no name yet; only the caller's thread uses ``line``, and only ``take`` uses
        ``say``.
        """
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

        Raises AgreementError if another living island has the name; finding out takes up to
        ``BEAT_S``, or ``WATCH_S`` if the other island was stopped. Raises PeerError if the
        rendezvous does not answer.
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
            # as in ``background_transfer``: no thread is inside torch when the interpreter ends
            self._net = util.Finalize(None, self._stop, exitpriority=-1)

    def release(self) -> None:
        """Release the name; harmless when called twice, never raises."""
        if self._beating is None:
            return
        self._net.cancel()
        self._stop()
        self._beating = None
        with contextlib.suppress(PeerError):  # without the store there is no name to release
            if self._line.get(self._place) == self._text.encode():
                self._line.drop(self._place)
            self._line.drop(_beats(self._own))

    def _lives(self, other: Mapping[str, Any]) -> bool:
        """Return whether the process ``other`` lives, by the rules at the top of this module."""
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
            # the code that sends messages reports a lost rendezvous
            with contextlib.suppress(PeerError):
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

    HIDDEN if it exists but cannot be inspected.
    """
    try:
        rest = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return None if rest[_STATE] in "ZX" else rest[_BEGAN]
    except OSError:
        pass
    with contextlib.suppress(PermissionError):  # the kernel's answer for another user's process
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
    return HIDDEN
