"""The examples for trainers people use: each runs on two ranks, compressed, and says so."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT, SCRIPTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLES = SCRIPTS / "examples"
BLOCK = EXAMPLES / "ddp.json"


def launch(folder: Path, name: str, *arguments: str, unmodified: bool = True) -> str:
    """What an example printed on two ranks; ``unmodified``: nothing of it is about the block."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    around = ["-m", "hybridcomp.run"] if unmodified else []
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if unmodified:
        environment["HYBRIDCOMP_CONFIG"] = str(BLOCK)
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
            "--master-port", str(port), *around, str(EXAMPLES / name), "--steps", "12", *arguments,
        ],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(printed: str) -> None:
    assert "[hybridcomp] step 10: dp blockint(bits=4)" in printed
    assert "final loss" in printed


def test_trainer_of_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    check(launch(tmp_path, "train_trainer.py", "--output", str(tmp_path / "out")))


def test_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    check(launch(tmp_path, "train_accelerate.py", "--block", str(BLOCK), unmodified=False))


def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    check(launch(tmp_path, "train_lightning.py"))
