"""The example over NCCL under ``scripts/one_gpu.py``: killed, resumed, misconfigured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed")

from tests.nccl.common import DEVICE, FEEDBACK, MARKS
from tests.nccl.launched import launch
from tests.paths import EXAMPLES, ROOT
from tests.ranks import python_path
from tests.training.example import CONFIG, losses, prepare

pytestmark = MARKS

STEPS, SAVED = 12, 6


def config(folder: Path, **more: Any) -> None:
    """Write ``job.json``: ZeRO 2 in bf16, gradients in 4 bits with error feedback."""
    found = {
        **CONFIG,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "compression": {"dp": FEEDBACK, "zero": "blockint", "min_bytes": 0},
        **more,
    }
    (folder / "job.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create data and a configuration."""
    folder = tmp_path_factory.mktemp("example")
    prepare(folder)
    config(folder)
    return folder


def command(name: str, *arguments: str) -> list[str]:
    """Return the launcher's command for the example, which logs to ``name``."""
    return [
        f"--device={DEVICE}", "--", "-m", "hybridcomp.run", str(EXAMPLES / "train_gpt.py"),
        "--deepspeed_config=job.json", "--layers=2", "--width=32", "--heads=2", "--length=32",
        "--eval-batches=0", f"--log={name}/loss.jsonl", *arguments,
    ]  # fmt: skip


def test_killed_and_resumed_is_the_unbroken_run(folder: Path) -> None:
    """All ranks are killed after a checkpoint, which restores the residuals."""
    whole = launch(*command("whole", f"--steps={STEPS}"), cwd=folder)
    assert whole.returncode == 0, whole.stdout[-3000:] + whole.stderr[-3000:]
    save = ("--save=checkpoint", f"--save-every={SAVED}", f"--steps={1000 * STEPS}")
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts/one_gpu.py"), *command("killed", *save)],
        cwd=folder, env={**os.environ, "PYTHONPATH": python_path()},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 200
        while len(losses(folder, "killed")) <= SAVED:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.terminate()  # ends its ranks at once
        process.wait(30)
    assert process.returncode == 143
    (folder / "checkpoint" / "latest").write_text(f"global_step{SAVED}")
    resumed = launch(*command("resumed", f"--steps={STEPS}", "--load=checkpoint"), cwd=folder)
    assert resumed.returncode == 0, resumed.stdout[-3000:] + resumed.stderr[-3000:]
    assert losses(folder, "resumed") == losses(folder, "whole")[SAVED:]


def test_a_mistake_is_told_once_more_at_the_end(folder: Path) -> None:
    found = launch(*command("none", "--steps=1", "--data=nowhere"), cwd=folder)
    assert found.returncode == 1
    assert "one_gpu: rank 0 failed with status 1" in found.stderr
    assert "train_gpt: " in found.stderr
