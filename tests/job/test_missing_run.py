"""A job with a block but without hybridcomp.run gets one warning."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from hybridcomp import missing_run
from hybridcomp.job.launcher import start_command
from tests.contributing.walk import distribution
from tests.paths import ROOT
from tests.ranks import RunRanks

BLOCK = {"dp": {"codec": "blockint", "bits": 4}}


def _step() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.SGD([weight], lr=0.1).step()


#: environment, command line, contents of FILE, and the expected warning; "": none
Case = tuple[dict[str, str], list[str], Any, str]
WHOLE = {"train_batch_size": 8, "compression": BLOCK}
HAS_BLOCK = "FILE has a block, and nothing is compressed: start with "
CASES: dict[str, Case] = {
    "variable": (
        {"HYBRIDCOMP_CONFIG": "FILE", "CROSS_RANK": "0"}, [], BLOCK,
        f"[hybridcomp] WARNING: HYBRIDCOMP_CONFIG: {HAS_BLOCK}"
        "`deepspeed ... --module hybridcomp.run train.py ...`, or call",
    ),
    "option": ({}, ["--deepspeed_config", "FILE"], WHOLE, HAS_BLOCK),
    "one word": ({}, ["--deepspeed=FILE"], WHOLE, HAS_BLOCK),
    "record": (
        {"HYBRIDCOMP_RECORD": "FILE"}, [], None, "HYBRIDCOMP_RECORD: nothing is written into FILE",
    ),
    "no block": ({}, ["--deepspeed=FILE"], {"train_batch_size": 8}, ""),
    "not enabled": ({}, ["--deepspeed=FILE"], {"compression": {"enabled": False, **BLOCK}}, ""),
    "no file": ({}, ["--deepspeed=FILE"], None, ""),
}  # fmt: skip


def trained(folder: Path, acting: bool) -> list[str]:
    """Run two steps for each case; return this rank's output. ``acting``: under hybridcomp."""
    assert dist.get_world_size() == 2
    outputs = []
    for name, (environment, words, _, _) in CASES.items():
        printed = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
            importlib.import_module("hybridcomp.patches.trainers.figures")  # as callbacks do
            patch.delitem(sys.modules, missing_run.ARMING, raising=False)
            if acting:
                patch.setitem(sys.modules, missing_run.ARMING, sys)
            for variable, value in environment.items():
                patch.setenv(variable, value.replace("FILE", str(folder / name)))
            named = [word.replace("FILE", str(folder / name)) for word in words]
            patch.setattr(sys, "argv", ["train.py", *named])
            calls: list[int] = []
            missing_run.watch()
            other = register_optimizer_step_post_hook(lambda *_, calls=calls: calls.append(1))
            _step()
            _step()
            other.remove()
            assert len(calls) == 2, "hooks of others run as ever"
        outputs.append(printed.getvalue())
    return outputs


def test_a_job_without_hybridcomp_gets_a_warning_once(on_ranks: RunRanks, tmp_path: Path) -> None:
    for name, (_, _, settings, _) in CASES.items():
        if settings is not None:
            (tmp_path / name).write_text(json.dumps(settings))
    assert "".join(map("".join, on_ranks(2, trained, tmp_path, True))) == ""
    outputs = map("".join, zip(*on_ranks(2, trained, tmp_path, False), strict=True))
    for (name, (*_, warning)), output in zip(CASES.items(), outputs, strict=True):
        expected = warning.replace("FILE", str(tmp_path / name))
        assert output.count(expected) == 1 if warning else output == "", name


def test_a_file_for_losses_that_an_attached_model_leaves_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HYBRIDCOMP_RECORD", "x.jsonl")
    monkeypatch.setitem(sys.modules, missing_run.ATTACHED, Mock(living=lambda: [1]))
    recording = Mock(has_recorded=lambda: False)
    monkeypatch.setitem(sys.modules, missing_run.RECORDING, recording)
    (said,) = missing_run._missing()
    assert "nothing is written into x.jsonl, as DeepSpeed engines are recorded, and this" in said
    recording.has_recorded = lambda: True
    assert list(missing_run._missing()) == []


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
