"""Trainings of the loss study on a GPU: what each is made of."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gpt.data import Samples
from gpt.indexed import IndexedTokens

import one_gpu
from benchmarks.training_bench import cells
from benchmarks.training_bench.gpu_cells import BUCKETS
from benchmarks.training_bench.spec import Spec

BASELINE = "baseline"
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
    # native once more: what the order of a GPU's sums alone does to a loss
    "again": None,
}
#: name -> layers, width, heads, tokens of a sample
MODELS = {"124M": (12, 768, 12, 1024), "tiny": (2, 64, 2, 32)}
LAYOUT, RANKS = "zero1", 2
#: what the learning rate does after the warm-up -> DeepSpeed's scheduler
SCHEDULES = {"linear": "WarmupDecayLR", "cosine": "WarmupCosineLR", "constant": "WarmupLR"}
WARMUPS = ("linear", "log")
#: of the steps, at their end, over which held-out text is read
LAST_PART = 5
#: trainings that begin together
TOGETHER = 2


@dataclass(frozen=True)
class Method:
    """Settings of every training of a study, which goes on with the same alone."""

    model: str
    steps: int
    samples: int  # of a rank in a micro-batch
    micro_batches: int
    lr: float
    schedule: str
    warmup: str  # linear, or DeepSpeed's own log, whose rate is high after few steps
    evaluations: int
    eval_tokens: int
    #: tokens and digests of the two datasets
    text: str

    @property
    def length(self) -> int:
        """Return the tokens of a sample."""
        return MODELS[self.model][3]

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of all ranks in an optimizer step."""
        return RANKS * self.samples * self.micro_batches * self.length

    @property
    def eval_batches(self) -> int:
        """Return the global batches of an evaluation, of as many tokens as those of a step."""
        return max(1, self.eval_tokens // self.tokens_per_step)

    @property
    def eval_every(self) -> int:
        """Return the steps from one evaluation to the next."""
        return max(1, self.steps // (LAST_PART * self.evaluations))

    @property
    def eval_from(self) -> int:
        """Return the step of the first evaluation; that of the last is the last one."""
        return max(1, self.steps - (self.evaluations - 1) * self.eval_every)

    def shorter(self, steps: float) -> Method:
        """Return this method with at most ``steps`` steps, so many that evaluations fit evenly."""
        even = LAST_PART * self.evaluations
        return replace(self, steps=int(steps) // even * even)

    def differences(self, other: dict[str, Any]) -> list[str]:
        """Say what of ``other``, as ``asdict`` writes a method, is not so here."""
        own = asdict(self)
        return [
            f"{name} {other.get(name)!r} there, {own[name]!r} here"
            for name in own
            if other.get(name) != own[name]
        ]


@dataclass(frozen=True)
class Text:
    """The two datasets: a digest, the tokens of each, and how many tokens are different."""

    digest: str
    train: int
    valid: int
    vocabulary: int

    @classmethod
    def of(cls, data: Path) -> Text:
        """Read what is needed of both. Raises DatasetError."""
        train, valid = (
            Samples(IndexedTokens(data.with_name(f"{data.name}_{name}")), 1, 0)
            for name in ("train", "valid")
        )
        seen = [each.fingerprint() for each in (train, valid)]
        digest = " ".join(f"{one['tokens']}:{one['content']}" for one in seen)
        most = max(train.vocabulary, valid.vocabulary)
        return cls(digest, int(seen[0]["tokens"]), int(seen[1]["tokens"]), most)


@dataclass(frozen=True)
class Case:
    """One training."""

    name: str
    seed: int
    #: a few steps over NCCL's sockets, to hold those of the group through memory against
    nccl: bool = False

    def __str__(self) -> str:
        return f"{self.name} seed {self.seed}{' over NCCL' if self.nccl else ''}"

    @property
    def stem(self) -> str:
        """Return the stem of the name of what is kept of it."""
        return f"{'nccl.' if self.nccl else ''}{self.name}.seed{self.seed}"

    def folder(self, out: Path) -> Path:
        """Return the folder that its ranks write into."""
        place = out.with_name(f"{out.name}_nccl") if self.nccl else out
        return place / LAYOUT / self.name / f"seed{self.seed}"


def turns_of(arms: Sequence[str], seeds: Sequence[int], nccl: bool) -> Iterator[tuple[Case, ...]]:
    """List the trainings that begin together: those of a seed, two at a time.

    The first two arms of all seeds come first; ``nccl``: before them those two over NCCL.
    """
    if nccl:
        yield tuple(Case(name, seeds[0], nccl=True) for name in arms[:TOGETHER])
    for start in range(0, len(arms), TOGETHER):
        for seed in seeds:
            yield tuple(Case(name, seed) for name in arms[start : start + TOGETHER])


def settings_of(case: Case, method: Method, ledger: Path) -> dict[str, Any]:
    """Return the DeepSpeed file: bf16, buckets of 100 MB, a tenth of warm-up, then the schedule."""
    config = cells.CONFIGS / cells.LAYOUTS[LAYOUT].config
    settings: dict[str, Any] = json.loads(config.read_text())
    settings["train_micro_batch_size_per_gpu"] = method.samples
    settings["gradient_accumulation_steps"] = method.micro_batches
    settings["steps_per_print"] = max(1, method.steps // 10)
    settings["bf16"] = {"enabled": True}
    settings["zero_optimization"] = {"stage": 1, **BUCKETS}
    settings["optimizer"]["params"] |= {"lr": method.lr, "fused": True}
    rates: dict[str, Any] = {
        "warmup_num_steps": max(2, method.steps // 10), "warmup_type": method.warmup,
    }  # fmt: skip
    if method.schedule != "cosine":
        rates["warmup_max_lr"] = method.lr
    if method.schedule != "constant":
        rates["total_num_steps"] = method.steps
    settings["scheduler"] = {"type": SCHEDULES[method.schedule], "params": rates}
    block = BLOCKS[case.name]
    if block is not None:
        settings["compression"] = {**block, "ledger": {"jsonl": str(ledger)}}
    return settings


def specs_of(case: Case, method: Method, asked: argparse.Namespace) -> list[Spec]:
    """Write the settings of a case below ``asked.logs`` and return the specs of both ranks."""
    folder = case.folder(asked.logs)
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
    patched, transport = BLOCKS[case.name] is not None, "" if case.nccl else asked.transport
    port, device = one_gpu.free_port(), "cpu" if asked.cpu else "cuda"
    return [
        Spec(
            rank, "train_gpt", arguments, patched,
            one_gpu.environment(rank, RANKS, port=port, device=device),
            str(folder / f"{rank}.log"), transport=transport,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
