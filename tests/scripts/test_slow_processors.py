"""Ranks on slower processors: what a process computes takes the given times as long."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

from lab import slow_processors
from lab.layout import LabError
from lab.slow_processors import SlowProcessors

COMPUTE = """
import time
began, used = time.perf_counter(), time.thread_time()
while time.thread_time() - used < 0.2:
    sum(range(1000))
print((time.perf_counter() - began) / (time.thread_time() - used))
"""
pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None or not Path("/proc/thread-self/schedstat").is_file(),
    reason="needs cc and a Linux that says how long threads wait",
)


def wall_to_core(own: SlowProcessors, rank: int) -> float:
    """Seconds that go by for each that a process computes."""
    words = [*own.words, sys.executable, "-c", COMPUTE]
    env = {**os.environ, "RANK": str(rank)}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    if done.returncode == 97 and re.search("perf_event_open", done.stderr):
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_a_rank_sleeps_in_proportion_to_what_it_computes() -> None:
    with slow_processors.slow_processors([1.0, 4.0]) as own:
        own.limit(True)
        # what its sleeping costs counts as computed: 3.6 on an idle machine
        assert wall_to_core(own, 1) > 2.5
        own.limit(False)
        before = own.folder
        assert before is not None and b"".join(
            (before / str(rank)).read_bytes() for rank in (0, 1)
        ) == 2 * bytes.fromhex("000000000000f03f")
    assert not before.exists()


def test_without_times_nothing_is_put_before_a_command() -> None:
    with slow_processors.slow_processors([]) as own:
        own.limit(True)
        assert own.words == ()


def test_a_source_that_does_not_compile_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.c").write_text("int main(")
    monkeypatch.setattr(slow_processors, "SOURCE", tmp_path / "bad.c")
    with (
        pytest.raises(LabError, match="bad.c does not compile"),
        slow_processors.slow_processors([2.0]),
    ):
        pass
