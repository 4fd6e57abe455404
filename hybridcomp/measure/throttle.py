"""Whether this process is given CPU time by the period, as containers with a limit are.

The kernel grants such a control group so many microseconds of its cores in every period (100 ms
where nobody says otherwise), and stops it for the rest once they are spent. A call that is shorter
than a grant then takes either what it takes alone or a pause more, and neither is what it takes in
a training: only calls over several periods tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def period_s(groups: Path = GROUPS, own: Path = OWN) -> float:
    """The longest period in seconds of a limit that this process is under; 0.0 where there is none.

    groups: where control groups are mounted, of either version. own: which ones are this process's.
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
    """The folder of a group and of all groups that it is in, under each root that exists.

    Inside a container the path may be that of the host, of which only the root is mounted.
    """
    own = Path(path.lstrip("/"))
    for root in roots:
        yield from (root / one for one in (own, *own.parents) if (root / one).is_dir())


def _period_us(folder: Path) -> float:
    """The period of a group's limit; 0.0 where it has none."""
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
