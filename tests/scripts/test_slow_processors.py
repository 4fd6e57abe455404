"""Ranks on slower processors: what a process computes takes the given times as long."""

from __future__ import annotations

import errno
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
WAITED_FOR_A_CORE = """
def waited():
    with open("/proc/thread-self/schedstat") as file:
        return int(file.read().split()[1])
sum(range(1_000_000))  # what it waited for a core since its start is made up for
before = waited()
"""
#: stretches shorter than what a signal comes behind; then bytes go out, or a clock is read
HANDED_ON = """
import os, time
def sleeps():
    with open("/proc/thread-self/status") as file:
        return int(file.read().split("\\nvoluntary_ctxt_switches:")[1].split()[0])
late, nowhere = 0, os.open(os.devnull, os.O_WRONLY)
for _ in range(100):
    slept = sleeps()
    sum(range(15_000))
    {then}
    late += sleeps() > slept
print(late, waited() - before)
"""
THEN = ('os.writev(nowhere, [b"x"])', "time.perf_counter()")
WAITED = """
import ctypes
libc, past = ctypes.CDLL(None), (ctypes.c_long * 2)(1, 0)
cond, mutex = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
sum(range(20_000))  # half a millisecond
woken = [libc.pthread_cond_timedwait(cond, mutex, past) for _ in range(3)]
print(woken[0] * 1000 + max(woken), waited() - before)
"""
#: nanoseconds: what a rank waits longer for a core is taken off what it sleeps
MOST_WAIT, TRIALS = 500_000, 5
pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None or not Path("/proc/thread-self/schedstat").is_file(),
    reason="needs cc and a Linux that says how long threads wait",
)


def printed(own: SlowProcessors, rank: int, program: str = COMPUTE) -> list[float]:
    """The numbers that a program says; COMPUTE: seconds that go by for each that it computes."""
    words = [*own.words, sys.executable, "-c", program]
    env = {**os.environ, "RANK": str(rank)}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    if done.returncode == 97 and re.search("perf_event_open", done.stderr):
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    return [float(word) for word in done.stdout.split()]


def undisturbed(own: SlowProcessors, program: str) -> float:
    """What a program says that did not wait for a core; skips where that is not to be had."""
    for _ in range(TRIALS):
        found, wait = printed(own, 0, WAITED_FOR_A_CORE + program)
        if wait <= MOST_WAIT:
            return found
    pytest.skip("others have the cores")


def test_a_rank_sleeps_in_proportion_to_what_it_computes() -> None:
    with slow_processors.slow_processors([1.0, 4.0]) as own:
        own.limit(True)
        # what its sleeping costs counts as computed: 3.6 on an idle machine
        assert printed(own, 1)[0] > 2.5
        own.limit(False)
        before = own.folder
        assert before is not None and b"".join(
            (before / str(rank)).read_bytes() for rank in (0, 1)
        ) == 2 * bytes.fromhex("000000000000f03f")
    assert not before.exists()


@pytest.mark.parametrize("then", THEN)
def test_bytes_leave_and_clocks_are_read_as_by_a_slower_processor(then: str) -> None:
    with slow_processors.slow_processors([4.0]) as own:
        own.limit(True)
        # by signals alone it sleeps in every third stretch
        assert undisturbed(own, HANDED_ON.format(then=then)) > 80


def test_a_thread_that_waits_has_slept_before() -> None:
    with slow_processors.slow_processors([4.0]) as own:
        own.limit(True)
        # woken once without a reason, as conditions may be, then the time is over
        assert undisturbed(own, WAITED) == errno.ETIMEDOUT


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
