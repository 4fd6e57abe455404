"""The ledger's figures reach DeepSpeed's monitors and the JSONL file."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.training.test_checkpoint import make_engine, train

pytest.importorskip("deepspeed")


def monitored(folder: str, wandb: bool) -> None:
    import os

    import torch.distributed as dist

    os.environ["WANDB_MODE"] = "offline"
    os.environ["WANDB_DIR"] = folder
    os.environ["WANDB_SILENT"] = "true"
    extra: dict[str, Any] = {
        "steps_per_print": 2,
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "csv"},
        "tensorboard": {"enabled": True, "output_path": folder, "job_name": "tensorboard"},
    }
    if wandb:
        extra["wandb"] = {"enabled": True, "project": "hybridcomp-test"}
    block = {
        "zero": {"codec": "blockint", "bits": 8},
        "ledger": {"jsonl": f"{folder}/ledger.jsonl", "sample_every": 1},
    }
    train(make_engine(1, block=block, **extra), 0, 6, dist.get_rank())
    if wandb and dist.get_rank() == 0:
        import wandb as wandb_module

        wandb_module.finish()  # a test rank ends without its exit handlers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("monitor")
    try:
        import wandb  # noqa: F401

        has_wandb = True
    except ImportError:
        has_wandb = False
    run_ranks(2, monitored, str(found), has_wandb)
    return found


def test_csv(folder: Path) -> None:
    rows = list(csv.reader((folder / "csv" / "Train_Compression_dp_ratio.csv").open()))
    assert len(rows) == 1 + 3
    assert all(float(ratio) > 10 for _, ratio in rows[1:])
    names = {path.name for path in (folder / "csv").iterdir()}
    for figure in ("wire_MB", "raw_MB", "codec_ms", "wait_ms", "error", "ratio"):
        assert f"Train_Compression_dp_{figure}.csv" in names
        assert f"Train_Compression_zero_{figure}.csv" in names
    assert "Train_Compression_dp_residual_norm.csv" in names


def test_tensorboard(folder: Path) -> None:
    assert list((folder / "tensorboard").glob("events.*"))


def test_wandb(folder: Path) -> None:
    pytest.importorskip("wandb")
    data = b"".join(path.read_bytes() for path in folder.glob("wandb/offline-run-*/*.wandb"))
    assert b"Train/Compression/dp/ratio" in data


def test_jsonl(folder: Path) -> None:
    records = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records[:3]] == [2, 4, 6]
    first = records[0]["dimensions"]
    assert set(first) == {"dp", "zero"}
    assert first["dp"]["forward"]["codec"] == "blockint(bits=4)"
    assert 0 < first["zero"]["forward"]["error"] < 0.02
