"""The ledger's figures reach DeepSpeed's monitors and the JSONL file."""

from __future__ import annotations

import csv
import json
import math
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybridcomp.config import LedgerConfig
from hybridcomp.patches.ds import attach, record
from hybridcomp.session.reporter import report_interval
from hybridcomp.tools.compare import json_lines
from hybridcomp.tools.compare.wandb_files import read, read_training
from tests.ranks import RunRanks
from tests.training import trainer
from tests.training.test_checkpoint import make_engine, train

pytest.importorskip("deepspeed")


def monitored(folder: str, wandb: bool) -> None:
    os.environ["WANDB_MODE"] = "offline"
    os.environ["WANDB_DIR"] = folder
    os.environ["WANDB_SILENT"] = "true"
    extra: dict[str, Any] = {
        "steps_per_print": 2,
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "csv"},
        "tensorboard": {"enabled": True, "output_path": folder, "job_name": "tensorboard"},
    }
    if wandb:
        extra["wandb"] = {"enabled": True, "project": "hybridcomp-test", "group": "losses"}
        os.environ["HYBRIDCOMP_RECORD"] = f"{folder}/recorded.jsonl"
    block = {
        "zero": {"codec": "blockint", "bits": 8},
        "ledger": {"jsonl": f"{folder}/ledger.jsonl", "sample_every": 1},
    }
    losses = train(make_engine(1, block=block, **extra), 0, 6, dist.get_rank())
    dist.barrier()
    Path(folder, f"losses{dist.get_rank()}.json").write_text(json.dumps(losses))
    if wandb and dist.get_rank() == 0:
        import wandb as wandb_module

        wandb_module.finish()  # a test rank ends without its exit handlers


@pytest.fixture(scope="module")
def folder(module_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("monitor")
    module_ranks(2, monitored, str(found), find_spec("wandb") is not None)
    return found


def recorded(folder: Path, trains: bool) -> None:
    """Record steps of a module in one mode, each followed by a validation in eval mode."""
    job = trainer.Job(stage=1, block={"zero": "none"})
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HYBRIDCOMP_RECORD", str(folder / f"{trains}.jsonl"))
        patched.setattr(record, "_recorded", False)
        engine = trainer.make_engine(job)
        engine.train(trains)
        for step in range(5):
            trainer.train_step(engine, job, step)
            engine.eval()
            engine(trainer.batch(7, step, torch.float32)[0])
            engine.train(trains)
    engine.destroy()


def recorded_in_both_modes(folder: Path) -> None:
    for trains in (True, False):
        recorded(folder, trains)


def test_a_run_in_eval_mode_is_recorded_alike(module_ranks: RunRanks, tmp_path: Path) -> None:
    """Every step has its loss and a fingerprint of its training data, without validations."""
    module_ranks(2, recorded_in_both_modes, tmp_path)
    trained, evaluated = (
        [json.loads(line) for line in (tmp_path / f"{trains}.jsonl").read_text().splitlines()]
        for trains in (True, False)
    )
    for line in (*trained, *evaluated):
        line.pop("seconds", None)
    assert evaluated == trained
    assert [line["step"] for line in trained if "step" in line] == [1, 2, 3, 4, 5]
    assert trained[0]["run"]["data"]["first_batch"]


def test_csv(folder: Path) -> None:
    rows = list(csv.reader((folder / "csv" / "train_compression_dp_ratio.csv").open()))
    assert len(rows) == 1 + 3
    assert all(float(ratio) > 10 for _, ratio in rows[1:])
    names = {path.name for path in (folder / "csv").iterdir()}
    for figure in ("wire_MB", "raw_MB", "codec_ms", "wait_ms", "error", "ratio"):
        assert f"train_compression_dp_{figure}.csv" in names
        assert f"train_compression_zero_{figure}.csv" in names
    assert "train_compression_dp_residual_norm.csv" in names


def test_tensorboard(folder: Path) -> None:
    assert list((folder / "tensorboard").glob("events.*"))


def test_wandb(folder: Path) -> None:
    pytest.importorskip("wandb")
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    config, about, history = read(file)
    assert about.run_group == "losses"
    assert config["compression"]["zero"] == {"codec": "blockint", "bits": 8}
    assert config["codecs"]["dp/forward"] == "blockint(bits=4)"
    names = {name for values in history.values() for name in values}
    for figure in ("ratio", "wire_MB", "raw_MB", "codec_ms", "wait_ms", "error"):
        assert {f"train/compression/{dim}/{figure}" for dim in ("dp", "zero")} <= names
    assert "train/compression/dp/residual_norm" in names
    found = read_training(file.parent)
    assert found.ledger["zero"]["forward"]["codec"] == "blockint(bits=8)"
    assert found.losses == pytest.approx(mean_losses(folder))


def mean_losses(folder: Path) -> list[float]:
    """Return the mean losses of both ranks."""
    ranks = [json.loads((folder / f"losses{rank}.json").read_text()) for rank in (0, 1)]
    return [(one + two) / 2 for one, two in zip(*ranks, strict=True)]


def test_recorded(folder: Path) -> None:
    """HYBRIDCOMP_RECORD writes the log for ``hybridcomp compare --launch``."""
    pytest.importorskip("wandb")
    found = json_lines.read_training(folder / "recorded.jsonl", "none.jsonl")
    assert found.losses == pytest.approx(mean_losses(folder))
    assert found.identity["seed"] == 0
    assert found.identity["model"]["parameters"] == 48 * 53 + 53 + 53 * 48 + 48
    assert found.identity["data"]["first_batch"] and found.tokens is None  # no tokens: floats
    assert found.seconds is not None and found.seconds[0] > 0


def test_jsonl(folder: Path) -> None:
    records = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records[:3]] == [2, 4, 6]
    first = records[0]["dimensions"]
    assert set(first) == {"dp", "zero"}
    assert first["dp"]["forward"]["codec"] == "blockint(bits=4)"
    assert 0 < first["zero"]["forward"]["error"] < 0.02


def silenced(folder: str) -> None:
    """Train with DeepSpeed's file as Accelerate writes it, which keeps the ledger's interval."""
    block = {"zero": "bf16", "ledger": {"jsonl": f"{folder}/ledger.jsonl", "every": 3}}
    engine = make_engine(1, block=block, steps_per_print=float("inf"))
    train(engine, 0, 6, dist.get_rank())
    dist.barrier()


def test_a_job_that_silences_deepspeed_still_sees_the_ledger(
    module_ranks: RunRanks, tmp_path: Path
) -> None:
    module_ranks(2, silenced, str(tmp_path))
    records = [json.loads(text) for text in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "summary" not in record] == [3, 6]
    assert all(record["dimensions"]["zero"] for record in records if "summary" not in record)


@pytest.mark.parametrize(
    ("every", "steps_per_print", "expected"),
    [(None, 7, 7), (None, None, 10), (None, 0, 10), (None, math.inf, 10), (4, 7, 4)],
)
def test_how_often_the_ledger_reports(
    every: int | None, steps_per_print: float | None, expected: int
) -> None:
    assert report_interval(LedgerConfig(every=every), steps_per_print) == expected


def _without_a_key(folder: str) -> list[str]:
    """Return rank 0's output of a job whose W&B has no key."""
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        os.environ.pop(name, None)
    os.environ |= {"HOME": folder, "WANDB_DIR": folder, "NETRC": f"{folder}/netrc"}
    told: list[str] = []
    with (
        mock.patch.object(attach, "say", told.append),
        pytest.raises(Exception, match="key") as caught,
    ):
        make_engine(1, block={"dp": "bf16"}, wandb={"enabled": True, "project": "p"})
    assert type(caught.value).__module__.startswith("wandb")
    return told


def test_a_missing_key_is_told_before_the_traceback(module_ranks: RunRanks, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    ((said,),) = module_ranks(1, _without_a_key, str(tmp_path))
    assert said.startswith("W&B ended this job: ") and "wandb login" in said
