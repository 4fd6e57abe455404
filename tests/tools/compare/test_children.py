"""A compared training ends with the process that started it, including launcher and ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridcomp.tools.compare.children import run_logged
from tests.ranks import python_path

#: starts a rank, prints both process numbers, and waits; the rank ignores SIGTERM
LAUNCHER = """
import os, signal, subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", '''
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
'''], stdout=subprocess.PIPE, text=True)
rank.stdout.readline()
print(os.getpid(), rank.pid, flush=True)
time.sleep(600)
"""
STUDY = """
import sys
from pathlib import Path
from hybridcomp.tools.compare.children import run_logged
run_logged([sys.executable, "-c", sys.argv[1]], Path(sys.argv[2]), {}, farewell=0.2)
"""


def lives(pid: int) -> bool:
    """Return whether a process is running; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_study_alone_ends_all(tmp_path: Path, number: signal.Signals) -> None:
    output = tmp_path / "output.txt"
    study = subprocess.Popen(
        [sys.executable, "-c", STUDY, LAUNCHER, str(output)],
        env={**os.environ, "PYTHONPATH": python_path()},
        stderr=subprocess.PIPE,
    )
    pids: list[int] = []
    while len(pids) < 2:
        assert study.poll() is None
        time.sleep(0.02)
        pids = [int(word) for word in output.read_text().split()] if output.exists() else []
    assert all(map(lives, pids))
    study.send_signal(number)
    study.communicate()
    assert study.returncode != 0
    while any(map(lives, pids)):  # signals arrive at once, but processes end only when scheduled
        time.sleep(0.02)


def test_status_output_and_variables(tmp_path: Path) -> None:
    before, output = signal.getsignal(signal.SIGTERM), tmp_path / "output.txt"
    program = "import os, sys; print(os.environ['NAME'], flush=True); sys.exit('odd')"
    assert run_logged([sys.executable, "-c", program], output, {"NAME": "value"}) == 1
    assert output.read_text().split() == ["value", "odd"]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.nightly
def test_tests_in_the_background_of_a_shell_can_be_interrupted() -> None:
    """The shell starts background jobs, and so their children, with SIGINT ignored."""
    ignoring = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); import tests.conftest"
    child = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    code = f"{ignoring}; import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": python_path()}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["True"]
