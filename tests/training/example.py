"""Run the example trainer on several ranks, with and without the ``deepspeed`` launcher."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.paths import EXAMPLES, ROOT
from tests.scripts_on_ranks import free_port, run_python, run_script

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 8}},
    "zero_optimization": {"stage": 1},
    "steps_per_print": 2,
}


def prepare(folder: Path) -> None:
    """Make a small dataset, ``data/text``."""
    (folder / "text").mkdir()
    for number in range(20):
        (folder / "text" / f"{number}.txt").write_text(f"the quick brown fox no {number}\n" * 40)
    words = [str(EXAMPLES / "prepare_data.py"), "text", "--output", "data/text"]
    assert not run_python(*words, cwd=folder).returncode


def command_of(name: str, config: str, *arguments: str) -> list[str]:
    """Return the command that trains into ``name/loss.jsonl`` by ``config.json``."""
    return [
        str(ROOT / "scripts/examples/train_gpt.py"), "--deepspeed_config", f"{config}.json",
        "--layers=2", "--width=32", "--heads=2", "--length=32", "--eval-batches=1",
        f"--log={name}/loss.jsonl", *arguments,
    ]  # fmt: skip


def start(
    folder: Path, name: str, config: str, *arguments: str, module: bool = False, ranks: int = 2
) -> subprocess.Popen[str]:
    """Start a training into ``name/loss.jsonl``, in a separate session."""
    command = shutil.which("deepspeed", path=str(Path(sys.executable).parent))
    assert command is not None
    return subprocess.Popen(
        [
            sys.executable, command, "--num_gpus", str(ranks), "--master_addr", "127.0.0.1",
            "--master_port", str(free_port()), *(["--module", "hybridcomp.run"] if module else []),
            *command_of(name, config, *arguments),
        ],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
        env={
            **os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
            "TORCH_EXTENSIONS_DIR": str(folder / "ext"), "GLOO_SOCKET_IFNAME": "lo",
        },
    )  # fmt: skip


def kill(process: subprocess.Popen[str]) -> None:
    """Kill the ranks too, which outlive the launcher."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def train(
    folder: Path, name: str, config: str, *arguments: str, module: bool = False, ranks: int = 2
) -> str:
    """Train into ``name/loss.jsonl`` on ranks without a launcher; return the output."""
    script, *words = command_of(name, config, *arguments)
    ended = run_script(folder, script, *words, ranks=ranks, armed=module)
    assert ended.returncode == 0, ended.output
    return ended.output


def launch(
    folder: Path, name: str, config: str, *arguments: str, module: bool = False, ranks: int = 2
) -> str:
    """Do the same with the ``deepspeed`` launcher."""
    process = start(folder, name, config, *arguments, module=module, ranks=ranks)
    try:
        printed, _ = process.communicate()
    except BaseException:
        kill(process)
        raise
    assert process.returncode == 0, printed
    return str(printed)


def kill_after(folder: Path, name: str, step: int, process: subprocess.Popen[str]) -> None:
    """Kill a training silently once it has logged ``step``."""
    try:
        while len(losses(folder, name)) < step:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.01)
    finally:
        kill(process)


def records(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the log's records, without a partial last line."""
    path = folder / name / "loss.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses(folder: Path, name: str) -> list[float]:
    return [record["loss"] for record in records(folder, name) if "loss" in record]
