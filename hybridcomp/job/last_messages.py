"""Let the threads of gloo let go of the last messages before the interpreter ends.

A thread that carried a message lets go of its tensors when the rank that waited has gone on, and
takes Python's lock for it. Python before 3.14 ends a thread that asks for the lock while the
interpreter is taken down, in a place where C++ allows no end: the process aborts (SIGABRT,
``terminate called without an active exception``) though its training was good. Where another
process had the core, the thread comes that late: measured in 24 of 40 jobs whose threads of gloo
ran at the lowest priority, and in 3 of 26 as they are.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

#: what torch names the threads that carry messages (ProcessGroupGloo::runLoop)
CARRIER = "pt_gloo_runloop"
#: seconds that they get; a thread that computes for longer is none that lets go of tensors
PATIENCE_S = 30.0
#: looks one after the other that have to find all of them asleep
LOOKS = 3
_TASKS = Path("/proc/self/task")


def let_go(patience_s: float = PATIENCE_S) -> bool:
    """Wait until no thread that carries messages runs or wants to; False when time is up.

    Every sleep lends Python's lock to those that ask for it. A thread that waits for a peer's
    message sleeps, and is not waited for. True at once where there is no such thread, and where
    the threads cannot be seen (not Linux).
    """
    deadline, quiet = time.monotonic() + patience_s, 0
    while quiet < LOOKS:
        if not (states := _states()):
            return True
        time.sleep(0.001)
        states = _states()
        quiet = 0 if "R" in states else quiet + 1
        if not quiet and time.monotonic() > deadline:
            return False
    return True


def _states() -> list[str]:
    """Find the state of each thread of this process that carries messages."""
    try:
        threads = os.listdir(_TASKS)
    except OSError:
        return []
    found = []
    for thread in threads:
        try:
            text = (_TASKS / thread / "stat").read_text()
        except OSError:
            continue  # it has ended
        name, _, rest = text.partition("(")[2].rpartition(")")
        if name == CARRIER:
            found.append(rest.split()[0])
    return found
