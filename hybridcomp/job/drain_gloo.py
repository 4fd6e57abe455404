"""Let the threads of gloo release the last messages before the interpreter ends.

A gloo thread releases a message's tensors after the waiting rank has already continued, and takes
the GIL for that. Python before 3.14 kills a thread that requests the GIL while the interpreter
shuts down, at a point where C++ allows no exit: the process aborts (SIGABRT, ``terminate called
without an active exception``) although its training succeeded. A thread is late if another process
holds its core: jobs aborted in 24 of 40 runs with gloo threads at the lowest priority, and in 3 of
26 runs at the usual priority.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

#: torch's name of the threads that carry messages (ProcessGroupGloo::runLoop)
CARRIER = "pt_gloo_runloop"
#: seconds to wait for these threads; one that runs longer is not just releasing tensors
PATIENCE_S = 30.0
#: number of consecutive checks that must find all message threads asleep
LOOKS = 3
_TASKS = Path("/proc/self/task")


def let_go(patience_s: float = PATIENCE_S) -> bool:
    """Wait until no message thread is running or runnable; return False after the limit.

    Every sleep hands the GIL to threads that request it. A thread that waits for a peer's message
    is asleep and does not count. Returns True at once if there is no such thread, or if threads
    cannot be inspected (not Linux).
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
    """Return the state of each message thread of this process."""
    try:
        threads = os.listdir(_TASKS)
    except OSError:
        return []
    states = []
    for thread in threads:
        try:
            text = (_TASKS / thread / "stat").read_text()
        except OSError:
            continue  # the thread has ended
        name, _, rest = text.partition("(")[2].rpartition(")")
        if name == CARRIER:
            states.append(rest.split()[0])
    return states
