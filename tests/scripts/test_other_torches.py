"""``scripts/test_torch`` on stand-in environments: its commands and messages."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: an environment's interpreter: prints how it was called; version 9.9 fails
PYTHON = """#!/bin/sh
echo "$PATH"
echo "$*"
case $0 in */9.9/*) echo "1 failed"; exit 1 ;; esac
echo "== 3 passed =="
"""


@pytest.mark.parametrize("absolute", [False, True])
def test_each_version_runs_in_its_own_environment(absolute: bool, tmp_path: Path) -> None:
    """Programs that tests start belong to the same environment, wherever it is."""
    for version in ("2.4.0", "2.15.0", "9.9"):
        python = tmp_path / version / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(PYTHON)
        python.chmod(0o755)
        (tmp_path / version / "ready").touch()
    home = tmp_path if absolute else Path(os.path.relpath(tmp_path, ROOT))
    found = subprocess.run(
        [ROOT / "scripts" / "test_torch", "2.4.0", "2.15.0", "9.9"],
        env={**os.environ, "HYBRIDCOMP_TORCH_VENVS": str(home)},
        capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert found.returncode == 1, found.stderr
    lines = [line.split() for line in found.stdout.splitlines()]
    assert [line[:4] for line in lines] == [
        ["torch", "2.4.0:", "3", "passed"], ["torch", "2.15.0:", "3", "passed"],
        ["torch", "9.9:", "1", "failed"],
    ]  # fmt: skip
    for version, suites in (("2.4.0", "tests/nn"), ("2.15.0", "tests/patches/torch tests/nn")):
        path, call, _ = (tmp_path / f"{version}.txt").read_text().splitlines()
        assert path.split(os.pathsep)[0] == str(tmp_path / version / "bin")
        assert f"--dist loadfile {suites}" in call
