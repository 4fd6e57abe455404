"""GPT-NeoX by its launcher, from a checkout: script, configurations, W&B and TensorBoard."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT
from tests.ranks import run_ranks
from tests.training.neox_trainer import write_data
from tests.training.test_neox import HOME

pytestmark = [
    pytest.mark.skipif(not HOME, reason="GPT_NEOX_HOME names no GPT-NeoX checkout"),
    pytest.mark.skipif(find_spec("transformers") is None, reason="GPT-NeoX needs transformers"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

CONFIGS = ROOT / "configs" / "neox"
KEYS = [
    f"train/compression/tp/{way}/{figure}"
    for way in ("forward", "backward")
    for figure in ("ratio", "wire_MB", "raw_MB", "codec_ms", "wait_ms", "error")
]


def environment(folder: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {
        **os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo", "TORCH_EXTENSIONS_DIR": str(folder / "ext"),
        "GPT_NEOX_HOME": HOME, "HYBRIDCOMP_NEOX_CPU": "1", "DS_ACCELERATOR": "cpu",
        "WANDB_MODE": "offline", "WANDB_API_KEY": "0" * 40, "WANDB_DIR": str(folder),
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output of a ``deepy.py`` run with the CPU configuration."""
    found = tmp_path_factory.mktemp("launch")
    tiny = (CONFIGS / "tiny_cpu.yml").read_text()
    assert '"data/text_train"' in tiny
    data = write_data(str(found))
    (found / "tiny.yml").write_text(tiny.replace("data/text_train", data))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    more = {"master_addr": "127.0.0.1", "master_port": port, "tensorboard_dir": str(found / "tb")}
    (found / "more.yml").write_text(json.dumps(more))
    result = subprocess.run(
        [sys.executable, f"{HOME}/deepy.py", str(ROOT / "patches/neox/train_neox.py"),
         "tiny.yml", "more.yml"],
        cwd=found, env=environment(found), capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    (found / "out.txt").write_text(result.stdout + result.stderr)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-6000:]
    return found


def test_it_trains_compressed(folder: Path) -> None:
    said = (folder / "out.txt").read_text()
    assert "[hybridcomp] step 20: " in said
    assert "iteration       20/      20" in said
    records = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [5, 10, 15, 20, 20]
    for way in ("forward", "backward"):
        row = records[-1]["dimensions"]["tp"][way]
        assert row["native_messages"] == 0 and row["ratio"] == pytest.approx(3.87, abs=0.02)


def test_figures_are_in_the_wandb_run_of_neox(folder: Path) -> None:
    pytest.importorskip("wandb")
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    data = file.read_bytes()
    for key in (*KEYS, "train/lm_loss"):
        assert key.encode() in data, key


def test_figures_are_in_tensorboard(folder: Path) -> None:
    pytest.importorskip("tensorboard")
    module = "tensorboard.backend.event_processing.event_accumulator"  # untyped
    EventAccumulator = importlib.import_module(module).EventAccumulator

    (events,) = {file.parent for file in (folder / "tb").rglob("events.*")}
    reader = EventAccumulator(str(events))
    reader.Reload()
    assert [event.step for event in reader.Scalars(KEYS[0])] == [5, 10, 15, 20]
    assert len(reader.Scalars("train/lm_loss")) == 20


def parse(home: str, file: str, ranks: int) -> dict[str, Any]:
    """Return GPT-NeoX's DeepSpeed configuration for a file."""
    sys.path.insert(0, home)
    from megatron.neox_arguments import NeoXArgs

    whole = NeoXArgs.from_ymls([file], overwrite_values={"global_num_gpus": ranks})
    found: dict[str, Any] = json.loads(json.dumps(whole.deepspeed_config))
    return found


@pytest.mark.parametrize(("name", "ranks"), [("125M", 8), ("20B", 96), ("tiny_cpu", 2)])
def test_neox_takes_the_configuration(name: str, ranks: int) -> None:
    from hybridcomp.config import load_config

    (found,) = run_ranks(1, parse, HOME, str(CONFIGS / f"{name}.yml"), ranks)
    block = load_config(found)
    assert block is not None
    assert block.active("dp") is (name != "tiny_cpu")
    assert found["optimizer"]["params"]["eps"] == 1e-8


def test_block_at_the_top_level_is_explained(tmp_path: Path) -> None:
    (tmp_path / "job.yml").write_text('{"num_layers": 2, "compression": {"tp": "bf16"}}')
    result = subprocess.run(
        [sys.executable, "-m", "hybridcomp.patches.neox", "job.yml"],
        cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert 'put it under "deepspeed_extra_args": {"compression": {...}}' in result.stderr
