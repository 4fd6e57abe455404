"""A job with a block but without hybridcomp.run gets one warning."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from hybridcomp import missing_run
from hybridcomp.job.launcher import start_command
from tests.contributing.walk import distribution
from tests.paths import ROOT
from tests.ranks import run_ranks

BLOCK = {"dp": {"codec": "blockint", "bits": 4}}


def _step() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.SGD([weight], lr=0.1).step()


def _trains(environment: dict[str, str], words: list[str], acting: bool) -> str:
    """Run two steps; return this rank's output."""
    assert dist.get_world_size() == 2
    kept = {name: module for name, module in sys.modules.items() if missing_run.ACTING in name}
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        for name in kept:
            patch.delitem(sys.modules, name)
        if acting:
            patch.setitem(sys.modules, missing_run.ACTING, sys)
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["train.py", *words])
        calls: list[int] = []
        missing_run.watch()
        other = register_optimizer_step_post_hook(lambda *_: calls.append(1))
        _step()
        _step()
        other.remove()
        assert len(calls) == 2, "hooks of others run as ever"
    return printed.getvalue()


def _output(environment: dict[str, str], *words: str, acting: bool = False) -> str:
    return "".join(run_ranks(2, _trains, environment, list(words), acting))


def test_torch_calls_it() -> None:
    points = {point.name: point for point in entry_points(group="torch.backends")}
    assert points["hybridcomp"].load() is missing_run.watch


def test_an_installation_without_its_files_is_on_the_page(tmp_path: Path) -> None:
    """A moved checkout leaves metadata behind: torch then prints what the page quotes."""
    distribution(tmp_path, "hybridcomp", "1.0")
    points = tmp_path / "hybridcomp-1.0.dist-info" / "entry_points.txt"
    points.write_text("[torch.backends]\nhybridcomp = hybridcomp_moved:watch\n")
    done = subprocess.run(
        [sys.executable, "-c", "import torch"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"},
    )  # fmt: skip
    said = done.stderr.splitlines()
    message = next(line for line in said if line.startswith("RuntimeError: ")).partition(": ")[2]
    assert message.partition(". ")[0] in (ROOT / "docs" / "faq.md").read_text()
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stderr


def test_an_interpreter_without_a_command_line_imports_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in an embedded interpreter, where an error would break ``import torch``."""
    monkeypatch.delattr(sys, "argv")
    for name in ("HYBRIDCOMP_CONFIG", "HYBRIDCOMP_RECORD"):
        monkeypatch.delenv(name, raising=False)
    missing_run.watch()
    assert not list(missing_run._missing())


def test_a_block_that_the_environment_names_is_told_of_once(tmp_path: Path) -> None:
    file = tmp_path / "block.json"
    file.write_text(json.dumps(BLOCK))
    found = _output({"HYBRIDCOMP_CONFIG": str(file)})
    assert found.count(f"HYBRIDCOMP_CONFIG: {file} has a block, and nothing is compressed") == 1


@pytest.mark.parametrize("words", [["--deepspeed_config", "{}"], ["--deepspeed={}"]])
def test_a_block_in_the_file_of_an_option_is_told_of(words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({"train_batch_size": 8, "compression": BLOCK}))
    found = _output({}, *(word.format(file) for word in words))
    assert found.count(f"{file} has a block, and nothing is compressed") == 1


@pytest.mark.parametrize(
    "settings",
    [{"train_batch_size": 8}, {"compression": {"enabled": False, **BLOCK}}, None],
    ids=["no block", "not enabled", "no file"],
)
def test_a_file_without_a_block_is_none_of_its_business(
    settings: dict[str, object] | None, tmp_path: Path
) -> None:
    file = tmp_path / "ds_config.json"
    if settings is not None:
        file.write_text(json.dumps(settings))
    assert "compressed" not in _output({}, "--deepspeed_config", str(file))


def test_a_job_that_uses_hybridcomp_is_told_nothing(tmp_path: Path) -> None:
    file = tmp_path / "block.json"
    file.write_text(json.dumps(BLOCK))
    found = _output({"HYBRIDCOMP_CONFIG": str(file)}, acting=True)
    assert "compressed" not in found


#: environment variables that each launcher sets for a rank
LAUNCHERS = {
    "deepspeed": {"CROSS_RANK": "0"},
    "torchrun": {"TORCHELASTIC_RUN_ID": "none"},
    "accelerate": {"TORCHELASTIC_RUN_ID": "none", "ACCELERATE_ENABLE_CPU_AFFINITY": "0"},
    "python": {},
}


@pytest.mark.parametrize(
    ("launcher", "command"),
    [
        ("deepspeed", "`deepspeed ... --module hybridcomp.run train.py ...`"),
        ("torchrun", "`torchrun ... -m hybridcomp.run train.py ...`"),
        ("accelerate", "`accelerate launch ... -m hybridcomp.run train.py ...`"),
        ("python", "`python -m hybridcomp.run train.py ...`"),
    ],
)
def test_the_command_is_one_of_the_launcher_in_use(
    launcher: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """deepspeed does not know ``-m``, and no other launcher knows ``--module``."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert start_command(LAUNCHERS[launcher]) == command
    monkeypatch.setattr(sys, "argv", ["-c"])
    assert start_command(LAUNCHERS[launcher]) == command.replace("train.py", "SCRIPT")


def test_a_missing_block_says_the_command(tmp_path: Path) -> None:
    file = tmp_path / "block.json"
    file.write_text(json.dumps(BLOCK))
    found = _output({"HYBRIDCOMP_CONFIG": str(file), **LAUNCHERS["deepspeed"]})
    assert "[hybridcomp] WARNING: HYBRIDCOMP_CONFIG: " in found
    assert "start with `deepspeed ... --module hybridcomp.run train.py ...`, or call" in found


def test_a_file_to_record_into_that_nobody_writes_is_told(tmp_path: Path) -> None:
    found = _output({"HYBRIDCOMP_RECORD": str(tmp_path / "loss.jsonl")})
    assert found.count("HYBRIDCOMP_RECORD: nothing is written into ") == 1
    assert "hybridcomp.run train.py ...`, or call hybridcomp.install() before the engine" in found
    assert not _output({"HYBRIDCOMP_RECORD": str(tmp_path / "loss.jsonl")}, acting=True)
