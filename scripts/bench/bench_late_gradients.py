#!/usr/bin/env python3
"""Train pipelines without a flush beside the flush, over several seeds, and print their losses.

    python scripts/bench/bench_late_gradients.py                 # a minute a run on two free cores
    python scripts/bench/bench_late_gradients.py --cases flush stash --seeds 0 1

The example (scripts/train_gpt.py) in four stages: width 64, 64 tokens, 16 sequences a step, 400
steps from scratch with 40 of warm-up, clipping at 1. Losses are means of the last 20 steps; a gap
is to the flush, in percent, paired by seed, and ± is half of the 95% interval of the mean, by
Student's t. A run that has finished is not repeated. ``--only-tables``: no training.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here

import numpy as np

from bench import loss_study
from bench.loss_layouts import Layout
from hybridcomp.compare import CompareError, launch
from hybridcomp.compare.report import markdown_rows, mean_gap

ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}}
#: ``look_ahead`` has a first moment of its own
PLAIN_ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.0, 0.95]}}
NADAM = {
    "type": "NAdam",
    "params": {"lr": 1e-3, "betas": [0.99, 0.95], "decoupled_weight_decay": True},
}
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
MODEL = "--pp 4 --layers 4 --width 64 --heads 2 --length 64 --eval-every 0 --print-every 100"
SEQUENCES, WARMUP = 16, 40
STAGES = Layout("ds_pipe2_baseline.json", 4)


@dataclass(frozen=True)
class LateCase:
    """Micro-batches of a step, the optimizer, the block's ``pipeline``, and the case beside it."""

    micro_batches: int
    optimizer: Mapping[str, Any]
    pipeline: Mapping[str, Any] | None = None
    beside: str = "flush"

    @property
    def settings(self) -> dict[str, Any]:
        """Return DeepSpeed's settings."""
        rate = self.optimizer["params"]["lr"]
        found: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": SEQUENCES // self.micro_batches,
            "gradient_accumulation_steps": self.micro_batches,
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": 0},
            "optimizer": dict(self.optimizer),
            "gradient_clipping": 1.0,
            "scheduler": {
                "type": "WarmupLR",
                "params": {
                    "warmup_min_lr": 0, "warmup_max_lr": rate, "warmup_num_steps": WARMUP,
                    "warmup_type": "linear",
                },
            },
        }  # fmt: skip
        if self.pipeline is None:
            return found
        return {**found, "compression": {"pipeline": dict(self.pipeline)}}


def _ahead(versions: int | str, momentum: float) -> dict[str, Any]:
    return {"versions": versions, "correction": "look_ahead", "momentum": momentum}


CASES: dict[str, LateCase] = {
    "flush": LateCase(4, ADAM),
    "stash, look_ahead 0.9": LateCase(4, PLAIN_ADAM, _ahead("stash", 0.9)),
    "2, error_feedback": LateCase(4, ADAM, {"versions": 2, "correction": "error_feedback"}),
    "stash": LateCase(4, ADAM, {"versions": "stash"}),
    "1": LateCase(4, ADAM, {"versions": 1}),
    "2, NAdam": LateCase(4, NADAM, {"versions": 2}),
    "2": LateCase(4, ADAM, {"versions": 2}),
    "2, look_ahead 0.99": LateCase(4, PLAIN_ADAM, _ahead(2, 0.99)),
    "stash, NAdam, 1 micro-batch": LateCase(1, NADAM, {"versions": "stash"}),
    "1, pipemare, 1 micro-batch": LateCase(
        1, ADAM, {"versions": 1, "correction": "pipemare", "warmup": 50}
    ),
    "stash, look_ahead 0.9, 1 micro-batch": LateCase(1, PLAIN_ADAM, _ahead("stash", 0.9)),
    "stash, look_ahead 0.99, 1 micro-batch": LateCase(1, PLAIN_ADAM, _ahead("stash", 0.99)),
    "1, 1 micro-batch": LateCase(1, ADAM, {"versions": 1}),
    "stash, 1 micro-batch": LateCase(1, ADAM, {"versions": "stash"}),
    "SGD, 1 micro-batch: flush": LateCase(1, SGD),
    "SGD, 1 micro-batch: 1, spike": LateCase(
        1, SGD, {"versions": 1, "correction": "spike"}, "SGD, 1 micro-batch: flush"
    ),
    "SGD, 1 micro-batch: 1": LateCase(1, SGD, {"versions": 1}, "SGD, 1 micro-batch: flush"),
}


def train(name: str, seed: int, args: argparse.Namespace) -> None:
    """Train a case unless it is there already. Raises CompareError."""
    case, folder = CASES[name], args.out / name / f"seed{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "ds_config.json"
    config.write_text(json.dumps(case.settings, indent=1))
    words = [
        *loss_study.launcher(STAGES, case.pipeline is not None),
        str(loss_study.SCRIPTS / "train_gpt.py"), "--deepspeed_config", str(config), "--data",
        str(args.data), *MODEL.split(), "--steps", str(args.steps), "--seed", str(seed), "--log",
        str(folder / "loss.jsonl"),
    ]  # fmt: skip
    told = {**case.settings, "steps": args.steps, "seed": seed}
    variables = loss_study.environment(folder)
    seconds = launch.LaunchedTraining(f"{name} seed {seed}", folder, words, told, variables).run()
    if seconds is not None:
        print(f"{name} seed {seed}: {seconds:.0f} s", flush=True)


def summaries(name: str, out: Path) -> dict[int, dict[str, float]]:
    """Return the last line of each finished run of a case, by seed."""
    found = {}
    for path in sorted(out.glob(f"{name}/seed*/loss.jsonl")):
        last = json.loads(path.read_text().splitlines()[-1])
        if last.get("summary"):
            found[int(path.parent.name.removeprefix("seed"))] = last
    return found


def table(out: Path) -> list[str]:
    """Return rows of all cases with a finished run, by their order here."""
    rows = [["", "seeds", "loss", "behind the flush, %", "validation"]]
    for name, case in CASES.items():
        runs, beside = summaries(name, out), summaries(case.beside, out)
        if not runs:
            continue
        losses = np.array([run["final_loss"] for run in runs.values()])
        gaps = np.array(
            [
                100 * (run["final_loss"] / beside[seed]["final_loss"] - 1)
                for seed, run in runs.items()
                if seed in beside
            ]
        )
        is_flush = case.pipeline is None or not len(gaps)
        gap = "" if is_flush else mean_gap(gaps)
        validation = np.mean([run["valid_loss"] for run in runs.values()])
        rows.append([name, str(len(runs)), f"{losses.mean():.3f}", gap, f"{validation:.3f}"])
    return markdown_rows(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is missing, and print the table; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2, 3])
    add("--steps", type=int, default=400)
    add("--data", type=Path, default=Path("data/text"), metavar="PREFIX")
    add("--out", type=Path, default=Path("runs/late_gradients"), metavar="FOLDER")
    add("--only-tables", action="store_true", help="of what is there")
    args = parser.parse_args(argv)
    args.out, args.data = args.out.resolve(), args.data.resolve()
    try:
        for seed in () if args.only_tables else args.seeds:
            for name in args.cases:
                train(name, seed, args)
    except CompareError as error:
        print(f"bench_late_gradients: {error}", file=sys.stderr)
        return 1
    print("\n".join(table(args.out)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
