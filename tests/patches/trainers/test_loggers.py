"""Compression ratios and errors of the ledger in any trainer's logger."""

from __future__ import annotations

import csv
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from hybridcomp.tools.compare import Wishes, compared
from hybridcomp.tools.compare.trainer_state import FILE, read_training
from hybridcomp.tools.compare.wandb_files import read_training as read_wandb
from tests.patches.trainers.launched import EXAMPLES, launch, ledger, needs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TRAINER = "torchrun --standalone --nproc-per-node 2 -m hybridcomp.run " + (
    "scripts/examples/train_trainer.py --output out"
)
OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": "."}


def figures_of(history: list[dict[str, Any]], name: str) -> dict[int, float]:
    """Return by step the values of ``name`` in the Trainer's log."""
    return {record["step"]: record[name] for record in history if name in record}


def losses_of(history: list[dict[str, Any]]) -> dict[int, float]:
    return figures_of(history, "loss")


def history_of(folder: Path) -> list[dict[str, Any]]:
    return list(json.loads((folder / "out" / FILE).read_text())["log_history"])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_resumed_shows_the_ledger_in_log_json_and_wandb(stage: int, tmp_path: Path) -> None:
    needs("train_trainer.py scripts/examples/train_trainer.py deepspeed")
    pytest.importorskip("wandb", reason="wandb is not installed")
    file = json.loads((EXAMPLES / "zero.json").read_text())
    file["zero_optimization"] = {"stage": stage}
    if stage == 3:  # every parameter of such a small model would stay on every rank
        file["zero_optimization"]["stage3_param_persistence_threshold"] = 1000
    (tmp_path / "zero.json").write_text(json.dumps(file))
    command = f"DS_ACCELERATOR=cpu {TRAINER} --deepspeed zero.json --report-to wandb"
    for part, more, steps in (("first", "--steps 10", [10]), ("resumed", "--resume", [20])):
        printed = launch(tmp_path, f"{command} {more}", **OFFLINE)
        assert f"[hybridcomp] step {steps[0]}: dp blockint(bits=4)" in printed, part
        *reports, _ = ledger(tmp_path)  # a resumed part begins a new file
        assert [report["step"] for report in reports] == steps, part
        history = history_of(tmp_path)
        for dimension in ("dp", "zero"):
            ratios = figures_of(history, f"compression/{dimension}/ratio")
            report = reports[-1]["dimensions"][dimension]["forward"]
            assert list(ratios) == list(range(10, steps[-1] + 1, 10))
            assert ratios[steps[-1]] == pytest.approx(report["ratio"])
            errors = figures_of(history, f"compression/{dimension}/error")
            assert errors[steps[-1]] == pytest.approx(report["error"])
        assert list(losses_of(history)) == list(range(5, steps[-1] + 1, 5))
        runs = (tmp_path / "wandb").glob("offline-run-*")
        row = read_wandb(max(runs, key=lambda run: run.stat().st_mtime)).ledger["dp"]["forward"]
        report = reports[-1]["dimensions"]["dp"]["forward"]
        assert row["wire_MB"] == pytest.approx(report["wire_MB"])
        assert row["codec"] == report["codec"] == "blockint(bits=4)"
    assert losses_of(history)[20] < losses_of(history)[5]


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_resumed_under_torchs_own_engines_is_the_unbroken_run(engine: str, tmp_path: Path) -> None:
    needs("scripts/examples/train_trainer.py")
    block = json.loads((EXAMPLES / f"{engine}.json").read_text())
    block["dp"]["error_feedback"] = True  # the examples have none
    command = f"{TRAINER} --block block.json" + " --fsdp2" * (engine == "fsdp2")
    histories = {}
    for name, parts in (("whole", [""]), ("broken", ["--steps 10", "--resume"])):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "block.json").write_text(json.dumps(block))
        for part in parts:
            launch(folder, f"{command} {part}")
        histories[name] = history_of(folder)
    assert losses_of(histories["whole"]) == losses_of(histories["broken"])
    for figure in ("dp/residual_norm", "dp/error"):
        name = f"compression/{figure}"
        found = figures_of(histories["whole"], name)
        assert list(found) == [10, 20] and found == figures_of(histories["broken"], name)
    whole, broken = (tmp_path / name / "out" for name in ("whole", "broken"))
    result = compared([f"whole={whole}", f"broken={broken}"], Wishes(last=2))
    assert result.comparisons[1].gap == 0
    training = read_training(whole / FILE, "none.jsonl")  # from the log itself
    assert training.ledger["dp"]["forward"]["wire_MB"] > 0


def test_reporters_of_the_trainer_get_the_figures(tmp_path: Path) -> None:
    needs("scripts/examples/train_sft.py")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    command = TRAINER.replace("train_trainer", "train_sft")
    block = "--block scripts/examples/ddp.json --report-to tensorboard"
    launch(tmp_path, f"{command} {block}", TENSORBOARD_LOGGING_DIR="board")
    read = accumulator.EventAccumulator(str(tmp_path / "board"))
    read.Reload()
    assert [event.step for event in read.Scalars("train/compression/dp/ratio")] == [10, 20]
    assert [event.step for event in read.Scalars("train/loss")] == [5, 10, 15, 20]
    history = history_of(tmp_path)
    own = [record["mean_token_accuracy"] for record in history if "loss" in record]
    assert len(own) == 4  # TRL's own figures are in their place


def test_trackers_of_accelerate_get_the_figures(tmp_path: Path) -> None:
    needs("scripts/examples/train_accelerate.py")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    launch(
        tmp_path,
        "accelerate launch --main_process_port 0 --multi_gpu --num_processes 2 "
        "scripts/examples/train_accelerate.py --block scripts/examples/ddp.json "
        "--log-with tensorboard --output out",
    )
    read = accumulator.EventAccumulator(str(tmp_path / "out" / "hybridcomp"))
    read.Reload()
    assert [event.step for event in read.Scalars("train/compression/dp/error")] == [10, 20, 30, 40]


def test_loggers_of_lightning_get_the_figures(tmp_path: Path) -> None:
    needs("scripts/examples/train_lightning.py")
    command = "torchrun --standalone --nproc-per-node 2 -m hybridcomp.run "
    command += "scripts/examples/train_lightning.py --output out --strategy fsdp2"
    launch(tmp_path, f"HYBRIDCOMP_CONFIG=scripts/examples/fsdp2.json {command}")
    with (tmp_path / "out/lightning_logs/version_0/metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["train/compression/dp/ratio"]]
    assert [int(row["step"]) for row in rows] == [9, 19, 29, 39]
    reports = ledger(tmp_path)[:-1]
    for row, report in zip(rows, reports, strict=True):
        of_ledger = report["dimensions"]["zero"]["forward"]
        assert float(row["train/compression/zero/error"]) == pytest.approx(of_ledger["error"])


def test_torchtitans_tensorboard_gets_the_figures(tmp_path: Path) -> None:
    needs("scripts/examples/train_torchtitan.py")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    arguments = shlex.join(
        [
            "--module", "torchtitan_small", "--config", "small", "--dump_folder", "out",
            "--metrics.log_freq", "20",
            "--override.imports", "hybridcomp.patches.trainers.torchtitan.ledger_metrics",
        ]
    )  # fmt: skip
    command = "torchrun --standalone --nproc-per-node 2 -m hybridcomp.run "
    command += f"scripts/examples/train_torchtitan.py {arguments}"
    launch(tmp_path, f"HYBRIDCOMP_CONFIG=scripts/examples/fsdp2.json {command}")
    (board,) = (tmp_path / "out" / "tb").iterdir()
    read = accumulator.EventAccumulator(str(board))
    read.Reload()
    (event,) = read.Scalars("train/compression/dp/wire_MB")
    wire = [report["dimensions"]["dp"]["forward"]["wire_MB"] for report in ledger(tmp_path)[:-1]]
    # both reports since torchtitan's last log
    assert event.step == 20 and event.value == pytest.approx(sum(wire), rel=1e-5)


def test_torchtitans_checkpoints_hold_the_residuals(tmp_path: Path) -> None:
    needs("scripts/examples/train_torchtitan.py")
    overrides = ",".join(
        f"hybridcomp.patches.trainers.torchtitan.{name}"
        for name in ("ledger_metrics", "checkpoints")
    )
    arguments = "--module torchtitan_small --config small --dump_folder out --checkpoint.enable "
    arguments += f"--checkpoint.interval 10 --override.imports {overrides}"
    command = "torchrun --standalone --nproc-per-node 2 -m hybridcomp.run "
    command += f"scripts/examples/train_torchtitan.py {arguments}"
    whole = launch(tmp_path, f"HYBRIDCOMP_CONFIG=scripts/examples/fsdp2.json {command}")
    norms = [report["residual_norm"] for report in ledger(tmp_path)[:-1]]
    command += " --checkpoint.load_step 10"
    resumed = launch(tmp_path, f"HYBRIDCOMP_CONFIG=scripts/examples/fsdp2.json {command}")
    assert titan_losses(resumed) == {
        step: loss for step, loss in titan_losses(whole).items() if step > 10
    }
    assert [report["residual_norm"] for report in ledger(tmp_path)[:-1]] == norms[1:]


def titan_losses(printed: str) -> dict[int, str]:
    """Return by step torchtitan's losses on the console."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", printed)
    return {int(step): loss for step, loss in re.findall(r"step: +(\d+) +loss: +([\d.]+)", plain)}
