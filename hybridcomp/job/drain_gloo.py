"""Let the threads of gloo release the last messages before the interpreter ends.

A thread that carried a message releases its tensors after the waiting rank has gone on, and takes
Python's lock for it. Python before 3.14 ends a thread that asks for the lock while the interpreter
shuts down, at a place where C++ allows no exit: the process aborts (SIGABRT, ``terminate called
without an active exception``) although its training succeeded. A thread is that late where another
process had the core: in 24 of 40 jobs whose gloo threads ran at the lowest priority, and in 3 of 26
at the usual one.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

#: torch's name of the threads that carry messages (ProcessGroupGloo::runLoop)
CARRIER = "pt_gloo_runloop"
#: seconds for them; a thread that computes longer is not one that releases tensors
PATIENCE_S = 30.0
#: consecutive checks that have to see all of them asleep
LOOKS = 3
_TASKS = Path("/proc/self/task")


def let_go(patience_s: float = PATIENCE_S) -> bool:
    """Wait until no thread that carries messages runs or wants to; returns False after the limit.

    Every sleep gives Python's lock to threads that ask for it. A thread that waits for a peer's
    message sleeps, and is not waited for. Returns True at once where there is no such thread, and
    where the threads cannot be seen (not Linux).
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
    """Return the state of each thread of this process that carries messages."""
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
