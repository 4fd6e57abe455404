"""Trainings of the loss study on a GPU: what each is made of, and what is kept of it."""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import one_gpu
from bench.training_bench import cells
from bench.training_bench.gpu_cells import BUCKETS
from bench.training_bench.spec import Spec

BASELINE = "baseline"
FEEDBACK = {"codec": "blockint", "bits": 4, "error_feedback": True}
#: name -> block, the most telling first
BLOCKS: dict[str, dict[str, Any] | None] = {
    BASELINE: None,
    "recommended": {"preset": "recommended", "when": "always"},
    "lossless": {name: {"codec": "expcode"} for name in ("dp", "zero")},
    "delta": dict(cells.DELTA),
    "bound": {name: cells.BOUND[name] for name in ("dp", "zero")},
    "naive-zfp": {"preset": "naive-zfp"},
    "zhybrid": {"preset": "zhybrid"},
    "mzhybrid": {"preset": "mzhybrid"},
}
#: layers, width, heads, length
SMALL, TINY = (12, 768, 12, 1024), (2, 64, 2, 32)
LAYOUT = "zero1"


@dataclass(frozen=True)
class Case:
    """One training."""

    name: str
    seed: int
    #: a few steps over NCCL's sockets, to hold those of the group through memory against
    nccl: bool = False

    def __str__(self) -> str:
        return f"{self.name} seed {self.seed}{' over NCCL' if self.nccl else ''}"

    def folder(self, out: Path) -> Path:
        """Return the folder of its files, laid out as loss_study.py does."""
        place = out.with_name(f"{out.name}_nccl") if self.nccl else out
        return place / LAYOUT / self.name / f"seed{self.seed}"

    def finished(self, out: Path) -> bool:
        """Return whether it was trained to its end."""
        return (self.folder(out) / "done.json").is_file()


def cases_of(asked: argparse.Namespace) -> Iterator[Case]:
    """List the cases arm by arm, so that a study cut off has all seeds of some; or seed by seed."""
    seeds = asked.seeds
    cases = [Case(name, seed) for name in asked.arms for seed in seeds]
    held = [Case(name, seeds[0], nccl=True) for name in asked.arms[:2] if asked.nccl_steps]
    if asked.seed_by_seed:
        cases.sort(key=lambda case: asked.seeds.index(case.seed))
    yield from [*held, *cases]


def settings_of(case: Case, asked: argparse.Namespace) -> dict[str, Any]:
    """Return the file: bf16, buckets of 100 MB, a tenth of warm-up, then down to zero."""
    config = cells.CONFIGS / cells.LAYOUTS[LAYOUT].config
    settings: dict[str, Any] = json.loads(config.read_text())
    settings["train_micro_batch_size_per_gpu"] = asked.samples
    settings["steps_per_print"] = max(1, asked.steps // 10)
    settings["bf16"] = {"enabled": True}
    settings["zero_optimization"] = {"stage": 1, **BUCKETS}
    settings["optimizer"]["params"] |= {"lr": asked.lr, "fused": True}
    settings["scheduler"] = {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_max_lr": asked.lr, "warmup_num_steps": max(2, asked.steps // 10),
            "total_num_steps": asked.steps,
        },
    }  # fmt: skip
    block = BLOCKS[case.name]
    if block is not None:
        ledger = case.folder(asked.out) / "ledger.jsonl"
        settings["compression"] = {**block, "ledger": {"jsonl": str(ledger)}}
    return settings


def specs_of(case: Case, asked: argparse.Namespace, port: int) -> list[Spec]:
    """Write the settings of a case and return the specs of both ranks."""
    folder = case.folder(asked.out)
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "ds_config.json"
    config.write_text(json.dumps(settings_of(case, asked), indent=1))
    layers, width, heads, length = TINY if asked.tiny else SMALL
    arguments = (
        "--deepspeed_config", str(config), "--data", str(asked.data), "--seed", str(case.seed),
        "--layers", str(layers), "--width", str(width), "--heads", str(heads), "--length",
        str(length), "--steps", str(asked.steps), "--tie-embeddings", "--eval-batches", "32",
        "--print-every", str(max(1, asked.steps // 10)), "--log", str(folder / "loss.jsonl"),
    )  # fmt: skip
    logs = case.folder(asked.logs)
    logs.mkdir(parents=True, exist_ok=True)
    first = Spec(
        0,
        "train_gpt",
        arguments,
        BLOCKS[case.name] is not None,
        {},
        "",
        transport="" if case.nccl else asked.transport,
    )
    return [
        replace(
            first, rank=rank, log=str(logs / f"{rank}.log"),
            env=one_gpu.environment(
                rank, 2, port=port, device="cpu" if asked.cpu else "cuda"
            ),
        )
        for rank in range(2)
    ]  # fmt: skip


def summary(case: Case, asked: argparse.Namespace) -> str:
    """Sum up a finished training in a line."""
    records = [json.loads(x) for x in (case.folder(asked.out) / "loss.jsonl").open()]
    steps = [record for record in records if "step" in record]
    found = f"{statistics.median(r['seconds'] for r in steps) * 1e3:.1f} ms a step"
    if "summary" in records[-1]:
        last = records[-1]
        found += f", loss {last['final_loss']:.4f}, valid {last['valid_loss']:.4f}"
    return found


def keep(case: Case, asked: argparse.Namespace, finished: bool) -> None:
    """Mark a training that is over; of its curve a compressed copy, which is small."""
    folder = case.folder(asked.out)
    log = folder / "loss.jsonl"
    if log.is_file():
        with gzip.open(folder / "loss.jsonl.gz", "wb") as file:
            file.write(log.read_bytes())
    if finished:
        (folder / "done.json").write_text(json.dumps(settings_of(case, asked), indent=1))
