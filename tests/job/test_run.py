"""``python -m hybridcomp.run``: the script sees the same environment as without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hybridcomp
from hybridcomp.run import main, split
from tests.scripts_on_ranks import run_each, run_python

SCRIPT = """
import os, sys
print("name", __name__)
print("argv", sys.argv)
print("path", sys.path[0])
import helper
print("helper", helper.VALUE)
from hybridcomp.patches import registry
print("armed", registry.ARMED.armed)
"""


def launch(*arguments: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    words = ["-m", "hybridcomp.run", *arguments]
    (ended,) = run_each([words], cwd, {**os.environ, **more})
    return ended


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "train.py").write_text(SCRIPT)
    (tmp_path / "job" / "helper.py").write_text("VALUE = 42\n")
    return tmp_path


def test_script_sees_its_own_world(folder: Path) -> None:
    result = launch("--local_rank=1", "job/train.py", "--lr", "3", cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "name __main__" in result.stdout
    assert "argv ['job/train.py', '--local_rank=1', '--lr', '3']" in result.stdout
    assert f"path {folder / 'job'}" in result.stdout
    assert "helper 42" in result.stdout
    assert "armed True" in result.stdout


def test_module_form(folder: Path) -> None:
    result = launch("--local_rank=0", "-m", "train", "x", cwd=folder / "job")
    assert result.returncode == 0, result.stderr
    assert "name __main__" in result.stdout
    assert "'--local_rank=0', 'x']" in result.stdout


def test_a_missing_script_is_told_by_one_rank_of_a_node(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as caught:
            main(["nowhere.py"])
        assert caught.value.code == 2
        assert capsys.readouterr().err.count("no such script: nowhere.py") == lines
    with pytest.raises(SystemExit, match="2"):
        main([])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["job"], "job is a folder; name a script in it"),
        (["block.json"], "block.json is no Python script"),
        (["start.sh"], "start.sh is no Python script"),
        (["weights.pt"], "weights.pt is no Python script"),
        (["-m", "nosuch"], "no module nosuch is found from "),
        (["-m", "nosuch.train"], "no module nosuch.train is found from "),
        (["-m", "job"], "no module job.__main__ is found from "),
        (["-m", ".train"], "no module .train is found from "),
        (["-m", "job.train.py"], "-m job.train.py: expected a module, job.train; or leave -m out"),
    ],
    ids=lambda one: one[-1] if isinstance(one, list) else "",
)
def test_what_is_no_script_and_no_module_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    words: list[str], said: str,
) -> None:  # fmt: skip
    (folder / "start.sh").write_text("export A=1\npython train.py\n")
    (folder / "block.json").write_text('{"dp": "bf16"}\n')
    (folder / "weights.pt").write_bytes(b"PK\x00\xff\x00")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(hybridcomp, "install", lambda: None)
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, [*getattr(sys, name)])
    with pytest.raises(SystemExit, match="2"):
        main(words)
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith(f"hybridcomp.run: {said}")


def test_a_package_that_a_module_needs_is_no_missing_module(folder: Path) -> None:
    (folder / "job" / "__init__.py").write_text("import nosuch\n")
    result = launch("-m", "job.train", cwd=folder)
    assert "No module named 'nosuch'" in result.stderr and "no module job" not in result.stderr


def test_exit_code_of_the_script_is_kept(folder: Path) -> None:
    (folder / "fails.py").write_text("raise SystemExit(7)\n")
    assert launch("fails.py", cwd=folder).returncode == 7


def test_split() -> None:
    assert split(["--local_rank=0", "a.py", "--local_rank=9"]) == (
        ["--local_rank=0"],
        ["a.py", "--local_rank=9"],
    )
    assert split(["--local_rank=0"]) == (["--local_rank=0"], [])


DDP = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", init_method="file://{folder}/store", rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(2, 2))
for _ in range(2):
    model(torch.ones(1, 2)).sum().backward()
"""


def test_a_job_without_a_block_says_where_it_looked(folder: Path) -> None:
    (folder / "ddp.py").write_text(DDP.replace("{folder}", str(folder)))
    result = launch("ddp.py", cwd=folder, HYBRIDCOMP_CONFG="block.json")
    assert result.returncode == 0, result.stderr
    assert [line for line in result.stdout.splitlines() if "[hybridcomp]" in line] == [
        "[hybridcomp] HYBRIDCOMP_CONFG is not known and has no effect; did you mean "
        "HYBRIDCOMP_CONFIG?",
        "[hybridcomp] no block found (hybridcomp.install was given none; HYBRIDCOMP_CONFIG is not "
        "set): nothing of models under DistributedDataParallel is compressed",
    ]


def test_a_job_in_which_nothing_is_trained_says_so(folder: Path) -> None:
    (folder / "idle.py").write_text("print('done')\n")
    result = launch("idle.py", cwd=folder, WORLD_SIZE="2", RANK="0")
    assert result.stdout.startswith("done\n[hybridcomp] nothing was compressed: this script")
    assert launch("idle.py", cwd=folder, WORLD_SIZE="2", RANK="1").stdout == "done\n"
    assert launch("idle.py", cwd=folder, WORLD_SIZE="1").stdout == "done\n"
    recorded = launch("idle.py", cwd=folder, WORLD_SIZE="1", HYBRIDCOMP_RECORD="x.jsonl").stdout
    assert "HYBRIDCOMP_RECORD: nothing is written into x.jsonl: this script trained no" in recorded


def test_a_file_that_is_not_there_is_told_with_its_variable(folder: Path) -> None:
    result = launch("job/train.py", cwd=folder, HYBRIDCOMP_CONFIG="nowhere.json")
    assert result.returncode == 2
    assert result.stderr.startswith("hybridcomp: HYBRIDCOMP_CONFIG: found 'nowhere.json'; expected")


def test_install_takes_a_config(tmp_path: Path) -> None:
    """A mistake in it raises in the call to ``install``, not later."""
    code = (
        "import hybridcomp\n"
        "from hybridcomp.errors import ConfigError\n"
        "from hybridcomp.session import process\n"
        "hybridcomp.install({'dp': 'bf16'})\n"
        "config = process.configured()\n"
        "assert config is not None and config.active('dp')\n"
        "try:\n"
        "    hybridcomp.install({'dq': 'bf16'})\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    result = run_python("-c", code, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert 'compression.dq: found "bf16"; unknown key' in result.stdout
