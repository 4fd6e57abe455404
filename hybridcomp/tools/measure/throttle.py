"""Find the period of this process's CPU time limit, as containers set it.

The kernel grants such a control group so many microseconds of its cores in every period (100 ms by
default), and stops it for the rest of the period once they are spent. A call shorter than a grant
then takes either its plain time or that time plus a pause; neither is its mean time in a training,
which only timings over several periods show.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def period_s(groups: Path = GROUPS, own: Path = OWN) -> float:
    """Return the longest period, in seconds, of the process's CPU time limits; 0.0 without a limit.

    groups: where control groups are mounted, of either version. own: lists this process's groups.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return 0.0
    found = [0.0]
    for line in lines:
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        controllers = names.split(",") if names else []
        if controllers and "cpu" not in controllers:
            continue
        roots = [groups / names, groups / "cpu"] if controllers else [groups]
        for folder in _upwards(path, roots):
            found.append(_period_us(folder) * 1e-6)
    return max(found)


def _upwards(path: str, roots: list[Path]) -> Iterator[Path]:
    """Yield the existing folders of a group and of all groups that contain it, under each root.

    Inside a container the path may be the host's, of which only the root is mounted.
    """
    own = Path(path.lstrip("/"))
    for root in roots:
        yield from (root / one for one in (own, *own.parents) if (root / one).is_dir())


def _period_us(folder: Path) -> float:
    """Return the period of a group's limit in microseconds; 0.0 if it has none."""
    for read in (_first_version, _second_version):
        try:
            quota, period = read(folder)
        except (OSError, ValueError):
            continue
        return float(period) if quota > 0 else 0.0
    return 0.0


def _first_version(folder: Path) -> tuple[int, int]:
    quota, period = (
        int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period")
    )
    return quota, period


def _second_version(folder: Path) -> tuple[int, int]:
    quota, period = (folder / "cpu.max").read_text().split()
    return 0 if quota == "max" else int(quota), int(period)
