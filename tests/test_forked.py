"""``--workers``: results of forked processes, a failure, a process that ends, and ``-x``; ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ranks import RankPool, python_path

ONE = """
import os
def test_fails(): print("said"); assert 1 == 2
def test_ends(): os._exit(3)
def test_after(tmp_path): assert tmp_path.parent.name == "w2"
"""
OTHER = """
import os, time
def test_other(capsys):
    print(os.getpid())
    assert capsys.readouterr().out == f"{os.getpid()}\\n"
    assert os.getpid() != int(os.environ["PARENT"])
def test_waits(): time.sleep(float(os.environ["WAIT"]))
"""


@pytest.mark.nightly
@pytest.mark.parametrize("first", [True, False])
def test_workers_report_as_pytest_does(tmp_path: Path, first: bool) -> None:
    (tmp_path / "conftest.py").write_text("import os; os.environ['PARENT'] = str(os.getpid())")
    (tmp_path / "test_one.py").write_text(ONE)
    (tmp_path / "test_other.py").write_text(OTHER)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": python_path(), "WAIT": "600" if first else "0"}
    done = subprocess.run(
        [*command, "--workers", "2", *(["-x"] if first else [])],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode != 0
    assert "FAILED test_one.py::test_fails - assert 1 == 2" in done.stdout
    if first:
        assert "stopping after 1 failures" in done.stdout
        return
    assert "Captured stdout call" in done.stdout and "said" in done.stdout
    assert "FAILED test_one.py::test_ends - the worker ended in this test: 3" in done.stdout
    assert "2 failed, 3 passed" in done.stdout


KILLED = """
import os, signal
from tests.ranks import RankPool
print(*RankPool(2).run(os.getpid), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def _state(pid: int) -> str:
    """Return a process's state, as ``T`` of one that is stopped; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def test_idle_ranks_are_stopped_and_run_on() -> None:
    with RankPool(2) as pool:
        pids = pool.run(os.getpid)
        while [_state(pid) for pid in pids] != ["T", "T"]:
            time.sleep(0.01)
        assert pool.run(os.getpid) == pids
    assert [_state(pid) for pid in pids] == ["", ""]


@pytest.mark.nightly
def test_stopped_ranks_end_with_the_process_that_used_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": python_path()},
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    while any(_state(int(pid)) for pid in done.stdout.split()):
        time.sleep(0.01)
