"""An unmodified script under the ``deepspeed`` launcher, and on forked ranks: wrong blocks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scripts_on_ranks import Ended, free_port, run_python, run_script
from tests.selection import by_day

pytest.importorskip("deepspeed")

pytestmark = pytest.mark.slow

SCRIPT = """
import argparse, base64, json, os, signal, sys
import torch
import deepspeed
import deepspeed.ops
# a JIT build that CPU tests can do without
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--mode", default="")
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
rank = int(os.environ["RANK"])
config = None
if args.mode in ("differ", "missing", "base64"):
    config, args.deepspeed_config = json.load(open(args.deepspeed_config)), None
if args.mode == "differ" and rank == 1:
    config["compression"]["dp"]["bits"] = 5
if args.mode == "missing" and rank == 1:
    del config["compression"]
if args.mode == "base64":
    config = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
engine, *_ = deepspeed.initialize(
    args=args, model=model, model_parameters=model.parameters(), config=config
)
for step in range(12):
    if args.mode == "die" and rank == 1 and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(step * 2 + rank))
    loss = (engine(values) - values).square().mean()
    engine.backward(loss)
    engine.step()
print("FINISHED", rank, float(loss))
"""

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "steps_per_print": 5,
    "compression": {
        "dp": {"codec": "blockint", "bits": 4, "error_feedback": True},
        "zero": {"codec": "blockint", "bits": 8},
        "min_bytes": 0,
        "ledger": {"jsonl": "ledger.jsonl", "sample_every": 1},
    },
}


def forked(folder: Path, config: dict[str, Any], *arguments: str, armed: bool = True) -> Ended:
    """Start the ranks without a launcher."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "ds_config.json").write_text(json.dumps(config))
    words = ("--deepspeed_config", "ds_config.json", *arguments)
    return run_script(folder, "train.py", *words, armed=armed)


def launch(folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Start two ranks of ``script`` with the ``deepspeed`` launcher."""
    (folder / "train.py").write_text(script)
    (folder / "ds_config.json").write_text(json.dumps(CONFIG))
    command = shutil.which("deepspeed", path=str(Path(sys.executable).parent))
    assert command is not None
    words = [
        command, "--num_gpus", "2", "--master_addr", "127.0.0.1", "--master_port",
        str(free_port()), "--module", "hybridcomp.run", "train.py", "--deepspeed_config",
        "ds_config.json", *arguments,
    ]  # fmt: skip
    return run_python(
        *words, cwd=folder, TORCH_EXTENSIONS_DIR=str(folder / "ext"), GLOO_SOCKET_IFNAME="lo"
    )


def test_the_launcher_starts_armed_ranks(tmp_path: Path) -> None:
    """Each gets its variables and the script's arguments; importing DeepSpeed would take longer."""
    result = launch(tmp_path, "import os, sys\nprint(os.environ['WORLD_SIZE'], sys.argv)\n", "-x")
    assert result.returncode == 0, result.stdout + result.stderr
    for rank in (0, 1):
        words = ["train.py", f"--local_rank={rank}", "--deepspeed_config", "ds_config.json", "-x"]
        assert f"2 {words}" in result.stdout
    assert "[hybridcomp] nothing was compressed" in result.stdout


@pytest.mark.parametrize("launches", by_day([False, True], [False]))
def test_unmodified_script_trains_compressed(tmp_path: Path, launches: bool) -> None:
    if launches:
        launched = launch(tmp_path, SCRIPT)
        result = Ended(launched.returncode, launched.stdout + launched.stderr)
    else:
        result = forked(tmp_path, CONFIG)
    assert result.returncode == 0, result.output
    assert {"FINISHED 0", "FINISHED 1"} <= {line[:10] for line in result.output.splitlines()}
    assert "[hybridcomp] step 5: dp blockint(bits=4)" in result.output
    records = [json.loads(text) for text in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [5, 10, 10]
    assert records[-1]["summary"] is True
    row = records[0]["dimensions"]["dp"]["forward"]
    assert row["ratio"] > 10 and row["native_messages"] == 0 and 0.01 < row["error"] < 0.5
    assert records[0]["residual_norm"] > 0


def test_block_without_hybridcomp_is_upstream(tmp_path: Path) -> None:
    """DeepSpeed ignores the block, and the script trains."""
    result = forked(tmp_path, CONFIG, armed=False)
    assert result.returncode == 0, result.output
    assert {"FINISHED 0", "FINISHED 1"} <= {line[:10] for line in result.output.splitlines()}
    assert "[hybridcomp]" not in result.output


def test_base64_config(tmp_path: Path) -> None:
    result = forked(tmp_path, CONFIG, "--mode", "base64")
    assert result.returncode == 0, result.output
    assert "[hybridcomp] step 10: dp blockint(bits=4)" in result.output


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        (
            "differ",
            "rank(s) 1 differ from rank 0 "
            "(compression.dp.forward: 'blockint(bits=4)' against 'blockint(bits=5)'",
        ),
        ("missing", "rank(s) 1 differ from rank 0"),
    ],
)  # fmt: skip
def test_ranks_that_disagree_all_fail(tmp_path: Path, mode: str, message: str) -> None:
    result = forked(tmp_path, CONFIG, "--mode", mode)
    assert result.returncode != 0
    assert message in result.output
    assert "FINISHED" not in result.output


@pytest.mark.nightly
def test_dead_rank_ends_the_launcher(tmp_path: Path) -> None:
    result = launch(tmp_path, SCRIPT, "--mode", "die")
    assert result.returncode != 0
    assert "FINISHED" not in result.stdout


def test_mistake_in_the_block_is_one_line(tmp_path: Path) -> None:
    block = {**CONFIG["compression"], "dp": {"codec": "blockint", "bitz": 4}}
    result = forked(tmp_path, {**CONFIG, "compression": block})
    assert result.returncode != 0
    assert "compression.dp.bitz" in result.output and "'bits'" in result.output
    assert "FINISHED" not in result.output
