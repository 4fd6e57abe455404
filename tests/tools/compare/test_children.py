"""A training that is compared ends with the process that started it, launcher and ranks."""

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

#: starts a rank, says both numbers, and waits; the rank does not end by SIGTERM
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
    """Whether it runs; one that has ended and was not asked for its status does not."""
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
    while any(map(lives, pids)):  # a signal is sent at once, a process ends when it is its turn
        time.sleep(0.02)


def test_status_output_and_variables(tmp_path: Path) -> None:
    before, output = signal.getsignal(signal.SIGTERM), tmp_path / "output.txt"
    program = "import os, sys; print(os.environ['NAME']); sys.exit('odd')"
    assert run_logged([sys.executable, "-c", program], output, {"NAME": "value"}) == 1
    assert output.read_text().split() == ["value", "odd"]
    assert signal.getsignal(signal.SIGTERM) is before
