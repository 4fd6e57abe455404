"""Run the commands of the trainers' pages literally."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import commands
from tests.paths import ROOT, SCRIPTS

EXAMPLES = SCRIPTS / "examples"
#: packages that a script needs besides torch
NEEDS = {
    "train_trainer.py": ("transformers", "accelerate"),
    "train_distributed_config.py": ("transformers.distributed", "accelerate"),
    "train_accelerate.py": ("accelerate",),
    "train_sft.py": ("trl", "datasets"),
    "train_lightning.py": ("lightning",),
    "train_torchtitan.py": ("torchtitan", "triton", "tensorboard"),
}


def page_commands() -> list[str]:
    """Return every command of a page that starts an example, once."""
    started = (line for _, line in commands() if "scripts/examples/train_" in line)
    return list(dict.fromkeys(line for line in started if script_of(line) in NEEDS))


def script_of(command: str) -> str:
    """Return the name of a command's script."""
    (name,) = re.findall(r"scripts/examples/(train_\w+\.py)", command)
    return str(name)


def needs(command: str) -> None:
    """Skip if a command's packages are not installed."""
    for package in NEEDS[script_of(command)]:
        pytest.importorskip(package, reason=f"{package} is not installed")
    if "deepspeed" in command:
        pytest.importorskip("deepspeed", reason="deepspeed is not installed")


def launch(folder: Path, command: str, **variables: str) -> str:
    """Run ``command`` in ``folder``, which also has the repository's scripts; return its output."""
    if not (folder / "scripts").exists():
        (folder / "scripts").symlink_to(SCRIPTS)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "COLUMNS": "500",  # otherwise rich breaks lines
        **variables,
    }
    for name in ("DS_ACCELERATOR", "HYBRIDCOMP_CONFIG"):  # the command sets them itself
        environment.pop(name, None)
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def ledger(folder: Path) -> list[dict[str, Any]]:
    """Return the ledger's records that a command left in ``folder``."""
    lines = (folder / "ledger.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
