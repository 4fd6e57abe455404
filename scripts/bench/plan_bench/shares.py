"""Shares of a core for ranks: each in a control group of its own, with a quota.

Four ranks on two cores run twice as fast whenever two of them wait: then no time that was measured
while all computed holds in a pipeline, as it would on four machines. With a quota each rank has the
speed that it is given, whatever the others do; and one may be given half of it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.layout import LabError

GROUPS = Path("/sys/fs/cgroup/cpu")
#: microseconds in which a share is given out anew: far below what is timed, and not much above the
#: kernel's own slices
PERIOD_US = 5000


@dataclass(frozen=True)
class Shares:
    """The control groups of the ranks, and the share of a core of each (none: no limits at all).

    words: before a rank's command, they put it into its group.
    """

    groups: tuple[Path, ...] = ()
    each: tuple[float, ...] = ()
    words: tuple[str, ...] = ()

    def limit(self, on: bool) -> None:
        """Give every rank its share of a core, or all that there is."""
        for group, share in zip(self.groups, self.each, strict=True):
            quota = round(share * PERIOD_US) if on else -1
            (group / "cpu.cfs_quota_us").write_text(str(quota))


@contextlib.contextmanager
def shares(each: Sequence[float]) -> Iterator[Shares]:
    """Make a group for each rank, without a limit yet; they are removed at the end.

    Raises LabError where this machine has no such groups (version 1 of the cpu controller).
    """
    if not each:
        yield Shares()
        return
    if not (GROUPS / "cpu.cfs_quota_us").is_file():
        raise LabError(f"{GROUPS}: no cgroup v1 cpu controller; needed to share cores out")
    stem = f"hcplan{os.getpid()}_"
    groups = tuple(GROUPS / f"{stem}{rank}" for rank in range(len(each)))
    try:
        for group in groups:
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        enter = f'echo $$ > {GROUPS}/{stem}$RANK/cgroup.procs && exec "$@"'
        yield Shares(groups, tuple(each), ("sh", "-c", enter, "sh"))
    finally:
        for group in groups:
            with contextlib.suppress(OSError):
                group.rmdir()
