"""A share of a core for a process: several on one core, none of which runs faster for an idle one.

Ranks that share a core take what the others leave: a stage of a pipeline that works alone then runs
at twice the speed that it has beside another one, and no prediction from measured times can hold.
With a quota each has the speed that it is given, whatever the others do.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from lab.layout import LabError

ROOT = Path("/sys/fs/cgroup")
#: microseconds in which a share is given out anew: far below what is timed, and not much above the
#: kernel's own slices
PERIOD_US = 5000


def settings(share: float, first: bool) -> dict[str, str]:
    """The files of a control group and what to write; ``first``: of version 1.

    Raises LabError for a share that is none.
    """
    if not 0.2 <= share <= 1.0:
        raise LabError(f"share of a core: expected 0.2 to 1.0, found {share}")
    quota = round(share * PERIOD_US)
    if first:
        return {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(quota)}
    return {"cpu.max": f"{quota} {PERIOD_US}"}


@contextlib.contextmanager
def share_of_core(share: float, core: int) -> Iterator[None]:
    """This process with all its threads, on ``core`` alone and with ``share`` of it, in the body.

    Raises LabError where control groups cannot be made.
    """
    first = (ROOT / "cpu" / "cgroup.procs").is_file()
    parent = ROOT / "cpu" if first else ROOT
    own = parent / f"hclab-{os.getpid()}"
    cores = os.sched_getaffinity(0)
    try:
        own.mkdir()
        for name, text in settings(share, first).items():
            (own / name).write_text(text)
        (own / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        with contextlib.suppress(OSError):
            own.rmdir()
        raise LabError(
            f"share of a core: {error}; it takes root and the cpu controller under {ROOT}"
        ) from None
    _pin({core})
    try:
        yield
    finally:
        _pin(cores)
        (parent / "cgroup.procs").write_text(str(os.getpid()))
        time.sleep(0.01)  # threads that end just now still count
        with contextlib.suppress(OSError):
            own.rmdir()


def _pin(cores: set[int]) -> None:
    """All threads of this process, also those that torch has started."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            os.sched_setaffinity(int(task.name), cores)
