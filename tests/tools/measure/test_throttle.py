"""CPU time limits: their location, and timings that span several periods."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridcomp.tools.measure.clock import LEAST, PERIODS, HostCallClock, Run, samples, times_over
from hybridcomp.tools.measure.throttle import period_s


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_limit_of_the_second_version(tmp_path: Path) -> None:
    own, groups = tmp_path / "own", tmp_path / "groups"
    write(own, "0::/jobs/one\n")
    write(groups / "jobs/one/cpu.max", "max 100000\n")
    assert period_s(groups, own) == 0.0
    write(groups / "jobs/cpu.max", "50000 20000\n")  # of the process's group
    assert period_s(groups, own) == pytest.approx(0.02)


def test_limits_of_the_first_version(tmp_path: Path) -> None:
    own, groups = tmp_path / "own", tmp_path / "groups"
    write(own, "5:devices:/a\n2:cpu,cpuacct:/not/mounted/here\n1:cpuset:/b\n0::/\n")
    for path, quota in ((groups / "cpu", "22000"), (groups / "cpuset" / "b", "1000")):
        write(path / "cpu.cfs_quota_us", quota)
        write(path / "cpu.cfs_period_us", "100000")
    assert period_s(groups, own) == pytest.approx(0.1)
    write(groups / "cpu" / "cpu.cfs_quota_us", "-1")
    assert period_s(groups, own) == 0.0
    assert period_s(groups, tmp_path / "missing") == 0.0


class Granted(HostCallClock):
    """Calls of 1 ms on a device that is stopped for 3 ms after every 2 ms of work."""

    period_s = 0.005

    def __init__(self) -> None:
        self.worked = 0

    def seconds(self, run: Run, times: int = 1) -> float:
        before, self.worked = self.worked, self.worked + times
        pauses = self.worked // 2 - before // 2
        return (times * 1e-3 + pauses * 3e-3) / times


def test_timings_under_a_limit_last_several_periods() -> None:
    once = {Granted().seconds(lambda: None) for _ in range(3)}
    assert once == {1e-3}  # a single call, which does not show the limit
    found = samples(Granted(), lambda: None, 1.0)
    assert len(found) >= LEAST
    assert all(one == pytest.approx(2.5e-3, rel=0.1) for one in found)
    assert times_over(Granted(), lambda: None, PERIODS * 0.005) * 2.5e-3 >= 0.9 * PERIODS * 0.005
