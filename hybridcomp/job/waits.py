"""Wait for what other processes do: look again and again, and say what a long wait is for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from hybridcomp.job.gates import check_failed

T = TypeVar("T")
#: seconds after which a wait is reported; reported again each time it lasts REPEAT times as long
NOTICE_S, REPEAT = 10.0, 3
#: seconds between two looks: at first, and at most
LOOK_S, SELDOM_S = 0.01, 0.2


def unsaid(*_: object, **__: object) -> None:
    """Tell nobody, where no job waits, as in a benchmark."""


class Notices:
    """The moments of one wait, from now on, at which the user is told of it."""

    def __init__(self) -> None:
        self._began, self._next = time.monotonic(), NOTICE_S

    @property
    def seconds(self) -> float:
        """Return how long the wait has lasted."""
        return time.monotonic() - self._began

    def due(self) -> bool:
        """Return whether to tell the user now: once after each of 10, 30, 90 s and so on."""
        if self.seconds <= self._next:
            return False
        self._next *= REPEAT
        return True


def awaited(
    look: Callable[[], T | None],
    seconds: float,
    notice: Callable[[float], object] | None = None,
    first_s: float = LOOK_S,
) -> T | None:
    """Return what ``look`` finds, as soon as that is not None; None after ``seconds``.

    Raises where another rank fails in the operation of which the wait is a part. Looks, and never
    lets a store of torch.distributed wait: that writes a line of its own at each time-out.

    Args:
        look: finds it, or returns None.
        seconds: to wait at most.
        notice: tells the user what is waited for, and gets the seconds so far.
        first_s: seconds between the first two looks; they grow to SELDOM_S.
    """
    notices, pause = Notices(), first_s
    while True:
        check_failed(lambda: look() is not None)
        found = look()
        if found is not None or notices.seconds >= seconds:
            return found
        if notice is not None and notices.due():
            notice(notices.seconds)
        time.sleep(pause)
        pause = max(first_s, min(SELDOM_S, 1.5 * pause))
