"""``--workers``: results of forked processes, a failure, a process that ends, and ``-x``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import python_path

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
