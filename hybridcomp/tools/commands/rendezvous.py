"""Run the store through which islands that are jobs meet, until it is stopped."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hybridcomp.errors import ConfigError
from hybridcomp.escaping import one_line
from hybridcomp.job.waits import NOTICE_S, Notices
from hybridcomp.sync.rendezvous import BYE
from hybridcomp.sync.roster import Roster

#: seconds between two polls of the store, and most seconds of one poll
LOOK_S, REQUEST_S = 0.5, 2.0
#: how many meetings after the last decision a leaving island may name as its first absence
AHEAD = 16


def run(port: int) -> int:
    """Serve on ``port`` (0: any free one) until SIGINT or SIGTERM; return the exit status.

    Prints which islands join, leave, are left out and meet. Raises ConfigError where the port
    cannot be taken.
    """
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    _check_free(port)
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    _print(f"hybridcomp rendezvous at tcp://{socket.gethostname()}:{store.port}")
    record = Record(store, _print)
    while not ended.wait(LOOK_S):  # Python runs signal handlers between two waits
        record.look()
    del record, store
    return 0


class Record:
    """Follows the islands' announcements and decisions in the store, and reports them."""

    def __init__(self, store: Any, say: Callable[[str], object]) -> None:
        """Hold the ``store``, a TCPStore; ``say`` gets one line at a time."""
        self._store, self._say = store, say
        store.set_timeout(timedelta(seconds=REQUEST_S))
        self._announced = self._untold = 0
        self._last = Roster(-1, [])
        self._left: set[str] = set()
        self._notices = Notices()
        self._told_at = -NOTICE_S
        self._unreadable = False

    def look(self) -> None:
        """Report what happened since the last poll; text from islands is quoted, never run."""
        if self._unreadable:
            return
        try:
            self._read()
        except dist.DistStoreError:
            return  # a key was deleted in between: poll again
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._unreadable = True
            found = one_line(f"{type(error).__name__}: {error}")
            self._say(f"cannot read what islands write here ({found}); goes on serving in silence")
        if self._untold and self._notices.seconds - self._told_at >= NOTICE_S:
            self._tell([])

    def _read(self) -> None:
        while (text := self._get(f"joins/{self._announced}")) is not None:
            self._announced += 1
            self._say(f"island {one_line(json.loads(text)['island'])} has come")
        while (text := self._get(f"decided/{self._last.number + 1}")) is not None:
            self._decided(Roster(**json.loads(text)))
        for island in self._last.members:
            self._look_for_leave(island)

    def _decided(self, now: Roster) -> None:
        """Report a decision: at once if islands come or go, else every NOTICE_S seconds."""
        before, self._last = self._last, now
        self._untold += 1
        stays = {*now.present, *now.silent, *self._left}
        words = [f"{name} has left" for name in before.members if name not in stays]
        words += [f"{name} was silent and is left out" for name in now.silent]
        words += [f"{name} joins, with the weights of {now.giver}" for name in now.joining]
        self._left &= set(now.members)
        if words:
            self._tell(words)

    def _look_for_leave(self, island: str) -> None:
        numbers = range(self._last.number + 1, self._last.number + 1 + AHEAD)
        said = (self._get(f"stands/{number}/{island}") for number in numbers)
        if island not in self._left and BYE.decode() in said:
            self._left.add(island)
            self._say(f"island {one_line(island)} has left")

    def _tell(self, words: list[str]) -> None:
        number, met = self._last.number, ", ".join(self._last.present)
        since = f" ({self._untold} since the last line)" if self._untold > 1 else ""
        what = f"meeting {number} of {met}{since}" if met else "a run begins"
        self._say(one_line("; ".join([what, *words])))
        self._untold, self._told_at = 0, self._notices.seconds

    def _get(self, key: str) -> str | None:
        return bytes(self._store.get(key)).decode() if self._store.check([key]) else None


def _print(text: str) -> None:
    print(text, flush=True)


def _check_free(port: int) -> None:
    """Raise ConfigError if ``port`` cannot be bound: torch would print a screenful."""
    try:
        with socket.socket(socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except (OSError, OverflowError) as error:
        words = getattr(error, "strerror", None) or error
        raise ConfigError("--port", port, f"{words}; name another one") from error
