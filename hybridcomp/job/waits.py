"""Poll for other processes, and report long waits to the user."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from hybridcomp.job.gates import check_failed

T = TypeVar("T")
#: seconds after which a wait is first reported; each next report comes after REPEAT times as long
NOTICE_S, REPEAT = 10.0, 3
#: seconds between two polls: at first, and at most
LOOK_S, SELDOM_S = 0.01, 0.2


def unsaid(*_: object, **__: object) -> None:
    """Report nothing: for waits outside of jobs, as in a benchmark."""


class Notices:
    """The times at which to notify the user of a wait, which begins with this object."""

    def __init__(self) -> None:
        self._began, self._next = time.monotonic(), NOTICE_S

    @property
    def seconds(self) -> float:
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
    """Poll ``look`` and return its first result that is not None; None after ``seconds``.

    Raises if another rank fails in the surrounding operation. It polls, since ``wait`` of a
    torch.distributed store prints a line at each time-out.

    Args:
        look: returns the awaited value, or None.
        seconds: longest wait.
        notice: reports the wait to the user, given the seconds so far.
        first_s: seconds between the first two polls; they grow to SELDOM_S.
    """
    notices, pause = Notices(), first_s
    while True:
        check_failed(lambda: look() is not None)
        result = look()
        if result is not None or notices.seconds >= seconds:
            return result
        if notice is not None and notices.due():
            notice(notices.seconds)
        time.sleep(pause)
        pause = max(first_s, min(SELDOM_S, 1.5 * pause))
