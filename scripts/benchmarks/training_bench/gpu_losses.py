"""Define the trainings of the GPU loss study."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt.data import Samples
from gpt.indexed import IndexedTokens

import one_gpu
from benchmarks.training_bench import cells
from benchmarks.training_bench.gpu_cells import BUCKETS
from benchmarks.training_bench.spec import Spec

BASELINE = "baseline"
#: name -> block, the most informative first
BLOCKS: dict[str, dict[str, Any] | None] = {
    BASELINE: None,
    "recommended": {"preset": "recommended", "when": "always"},
    "lossless": {name: {"codec": "expcode"} for name in ("dp", "zero")},
    "delta": dict(cells.DELTA),
    "bound": {name: cells.BOUND[name] for name in ("dp", "zero")},
    "naive-zfp": {"preset": "naive-zfp"},
    "zhybrid": {"preset": "zhybrid"},
    "mzhybrid": {"preset": "mzhybrid"},
    # native again: the effect of the GPU's summation order on the loss
    "again": None,
}
#: name -> layers, width, heads, tokens per sample
MODELS = {"124M": (12, 768, 12, 1024), "tiny": (2, 64, 2, 32)}
LAYOUT, RANKS = "zero1", 2
#: final share of the steps, during which held-out loss is evaluated
LAST_PART = 5
#: trainings started at once
TOGETHER = 2


@dataclass(frozen=True)
class Method:
    """Settings of all trainings of a study; a study resumes only with the same settings."""

    model: str
    steps: int
    samples: int  # per rank and micro-batch
    micro_batches: int
    lr: float
    evaluations: int
    eval_tokens: int
    #: token counts and digests of the training and the held-out dataset
    text: str

    @property
    def length(self) -> int:
        """Return the tokens per sample."""
        return MODELS[self.model][3]

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens per optimizer step, over all ranks."""
        return RANKS * self.samples * self.micro_batches * self.length

    @property
    def eval_batches(self) -> int:
        """Return the global batches per evaluation, each with as many tokens as a step's."""
        return max(1, self.eval_tokens // self.tokens_per_step)

    @property
    def eval_every(self) -> int:
        """Return the steps between two evaluations."""
        return max(1, self.steps // (LAST_PART * self.evaluations))

    @property
    def eval_from(self) -> int:
        """Return the step of the first evaluation; the last evaluation is at the last step."""
        return max(1, self.steps - (self.evaluations - 1) * self.eval_every)


@dataclass(frozen=True)
class Text:
    """Digest of the training and held-out datasets, and the number of held-out tokens."""

    digest: str
    valid: int

    @classmethod
    def of(cls, data: Path) -> Text:
        """Read the two datasets PREFIX_train and PREFIX_valid. Raises DatasetError."""
        train, valid = (
            Samples(IndexedTokens(data.with_name(f"{data.name}_{name}")), 1, 0)
            for name in ("train", "valid")
        )
        seen = [each.fingerprint() for each in (train, valid)]
        digest = " ".join(f"{one['tokens']}:{one['content']}" for one in seen)
        return cls(digest, int(seen[1]["tokens"]))


@dataclass(frozen=True)
class Case:
    """One training."""

    name: str
    seed: int

    def __str__(self) -> str:
        return f"{self.name} seed {self.seed}"

    def folder(self, out: Path) -> Path:
        """Return the folder of its log, ledger, settings and output."""
        return out / self.name / f"seed{self.seed}"


def pairs_of(arms: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[Case, ...]]:
    """Yield the trainings that start together: two arms of the same seed.

    All seeds of the first two arms come before the other arms.
    """
    for start in range(0, len(arms), TOGETHER):
        for seed in seeds:
            yield tuple(Case(name, seed) for name in arms[start : start + TOGETHER])


def settings_of(case: Case, method: Method, ledger: Path) -> dict[str, Any]:
    """Return the DeepSpeed settings: bf16, buckets of 100 MB, 10 % warm-up, then a decay to 0."""
    settings = cells.native_settings(LAYOUT)
    settings["train_micro_batch_size_per_gpu"] = method.samples
    settings["gradient_accumulation_steps"] = method.micro_batches
    settings["steps_per_print"] = max(1, method.steps // 10)
    settings["bf16"] = {"enabled": True}
    settings["zero_optimization"] = {"stage": 1, **BUCKETS}
    settings["optimizer"]["params"] |= {"lr": method.lr, "fused": True}
    rates = {
        "warmup_num_steps": max(2, method.steps // 10), "warmup_type": "linear",
        "warmup_max_lr": method.lr, "total_num_steps": method.steps,
    }  # fmt: skip
    settings["scheduler"] = {"type": "WarmupDecayLR", "params": rates}
    block = BLOCKS[case.name]
    if block is not None:
        settings["compression"] = {**block, "ledger": {"jsonl": str(ledger)}}
    return settings


def specs_of(case: Case, method: Method, asked: argparse.Namespace) -> list[Spec]:
    """Write a case's settings below ``asked.out`` and return the specs of both ranks."""
    folder = case.folder(asked.out)
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "ds_config.json"
    settings = settings_of(case, method, folder / "ledger.jsonl")
    config.write_text(json.dumps(settings, indent=1))
    layers, width, heads, length = MODELS[method.model]
    arguments = (
        "--deepspeed_config", str(config), "--data", str(asked.data), "--seed", str(case.seed),
        "--layers", str(layers), "--width", str(width), "--heads", str(heads), "--length",
        str(length), "--steps", str(method.steps), "--tie-embeddings",
        "--eval-batches", str(method.eval_batches), "--eval-every", str(method.eval_every),
        "--eval-from", str(method.eval_from),
        "--print-every", str(max(1, method.steps // 10)), "--log", str(folder / "loss.jsonl"),
    )  # fmt: skip
    patched = BLOCKS[case.name] is not None
    port, device = one_gpu.free_port(), "cpu" if asked.cpu else "cuda"
    return [
        Spec(
            rank, "train_gpt", arguments, patched,
            one_gpu.environment(rank, RANKS, port=port, device=device),
            str(folder / f"{rank}.log"), transport="gpu_memory",
        )
        for rank in range(RANKS)
    ]  # fmt: skip
