"""``scripts/one_gpu.py`` with a script that needs no GPU: rank identity, reports of failures."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import one_gpu
from tests.nccl.launched import launch
from tests.paths import ROOT

#: a rank prints its identity; the second fails, or all wait for it
SCRIPT = """
import os, sys, time
print("rank", os.environ["RANK"], os.environ["NCCL_HOSTID"], os.environ["CROSS_RANK"],
      os.environ["TORCH_EXTENSIONS_DIR"], *sys.argv[1:])
if sys.argv[1:] == ["fail"] and os.environ["RANK"] == "1":
    sys.exit("this rank has had enough")
if sys.argv[1:] == ["kill"] and os.environ["RANK"] == "1":
    os.kill(os.getpid(), 9)
if sys.argv[1:] in (["fail"], ["kill"], ["wait"]):
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("script") / "job.py"
    path.write_text(SCRIPT)
    return str(path)


def test_every_rank_has_a_host_and_a_folder(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)  # otherwise the ranks inherit it
    found = launch("--ranks=4", "--per-node=2", "--", script, "fine")
    assert found.returncode == 0, found.stdout + found.stderr
    lines = sorted(line for line in found.stdout.splitlines() if "rank" in line)
    words = [line.split() for line in lines]
    assert [line[0] for line in words] == ["[0]", "[1]", "[2]", "[3]"]
    assert [line[4] for line in words] == ["0", "0", "1", "1"]
    assert len({line[3] for line in words}) == len({line[5] for line in words}) == 4
    assert all(line[-1] == "fine" for line in words)


def test_ranks_share_the_folder_of_extensions_that_the_user_names(
    script: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    found = launch("--ranks=2", "--", script, "fine")
    words = [line.split() for line in found.stdout.splitlines() if "rank" in line]
    assert [line[5] for line in words] == [str(tmp_path)] * 2


@pytest.mark.parametrize(
    ("what", "status", "words"),
    [
        ("fail", 1, "rank 1 failed with status 1. Its last lines:"),
        ("kill", 137, "rank 1 was killed by signal 9"),
    ],
)
def test_a_failing_rank_ends_all(script: str, what: str, status: int, words: str) -> None:
    found = launch("--ranks=3", "--grace=0.5", "--", script, what)
    assert found.returncode == status
    assert words in found.stderr
    assert ("this rank has had enough" in found.stderr) == (what == "fail")
    for rank in (0, 2):
        assert f"rank {rank} still ran and was ended, since another failed" in found.stderr


def test_time_runs_out(script: str) -> None:
    found = launch("--timeout=1", "--quiet", "--", script, "wait")
    assert found.returncode == 124
    assert "rank 1 ran out of time (--timeout) and was ended" in found.stderr
    assert "rank 0" in found.stdout and "rank 1" not in found.stdout


def test_ranks_do_not_outlive_a_killed_launcher() -> None:
    """``subprocess.run`` kills its child on Ctrl-C, and so does pytest."""
    told = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    words = [sys.executable, "scripts/one_gpu.py", "--device=cpu", "--", "-c", told]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pids = [int(launcher.stdout.readline().split()[1]) for _ in range(2)]
        launcher.kill()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            for _ in range(1000):
                os.kill(pid, 0)
                time.sleep(0.01)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks=2"], "expected a command after --"),
        (["--ranks=3", "--per-node=2", "--", "x.py"], "divides --ranks 3, found 2"),
    ],
)
def test_wrong_command_lines(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        one_gpu.main(arguments)
    assert caught.value.code == 2 and words in capsys.readouterr().err


def test_a_command_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert one_gpu.main(["--", "/nowhere/command"]) == 2
    assert "one_gpu: " in capsys.readouterr().err


def test_scripts_run_under_this_python() -> None:
    assert one_gpu.words(["job.py", "x"]) == [sys.executable, "job.py", "x"]
    assert one_gpu.words(["-m", "job"]) == [sys.executable, "-m", "job"]
    assert one_gpu.words(["torchrun", "job.py"]) == ["torchrun", "job.py"]
