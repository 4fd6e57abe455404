#!/usr/bin/env python3
"""Measure the loss gap of compression at the size of GPT-2 small, on one GPU.

scripts/examples/prepare_data.py FOLDER ... --suffix .py --vocabulary 50257 --max-bytes 90000000 \\
    --valid-fraction 0.04 --output data/gpt2
scripts/benchmarks/gpu_losses.py --data data/gpt2 --budget 480 --out runs/gpu/losses

124 M parameters in bf16 under ZeRO 1 on two ranks, which exchange bytes through GPU memory
(training_bench/gpu_memory.py) and get the same sums as over NCCL.

A pair is the native and the compressed training of one seed, started together with the same weights
and data. Held-out loss is evaluated --evaluations times in the last fifth of the steps. A seed's
gap is the mean over these evaluations; the 95 % interval is that of the mean over seeds. A call
starts only pairs that fit its --budget; a finished training keeps its log in --out and is not
repeated. It exits with 75 while seeds are missing; run the same command again to continue.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))  # gpt, train_gpt

import numpy as np
from gpt.indexed import DatasetError

from benchmarks.shared import TIME_IS_UP, parser_of, say
from benchmarks.training_bench import forked, gpu_losses
from benchmarks.training_bench.gpu_losses import BASELINE, Case, Method, Text
from hybridcomp.tools.compare.statistics import LEAST, half_width
from lab.team import sigterm_raises

#: held-out tokens per evaluation
EVAL_TOKENS = 2**19
#: seconds of the budget reserved for work after the last step
RESERVE_S = 8.0
#: failing pairs after which no other pair starts
FAILURES = 2
#: percent: the maximum gap aimed at
AIM = 0.1


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; adds ``method``."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--steps", type=int, default=800)
    add("--seeds", type=int, nargs="+", default=list(range(8)))
    add("--arms", nargs="+", choices=list(gpu_losses.BLOCKS), default=[BASELINE, "recommended"],
        help="the first two of every seed come first")  # fmt: skip
    add("--model", choices=list(gpu_losses.MODELS), default="124M")
    add("--tiny", action="store_const", dest="model", const="tiny", help="one for a CPU")
    add("--samples", type=int, default=8, help="of a rank in a micro-batch, 1024 tokens each")
    add("--micro-batches", type=int, default=1, help="of a step")
    add("--lr", type=float, default=3e-4)
    add("--evaluations", type=int, default=4, metavar="N", help="in the last fifth of the steps")
    add("--eval-tokens", type=int, metavar="N",
        help=f"of each evaluation; default: {EVAL_TOKENS}, or what is held out")  # fmt: skip
    add("--budget", type=float, default=1e9, metavar="S", help="what is not over then is ended")
    add("--timeout", type=float, default=900.0, metavar="S", help="of a start or a training")
    add("--data", type=Path, default=Path("data/gpt2"), metavar="PREFIX")
    add("--out", type=Path, default=Path("runs/gpu/losses"), metavar="FOLDER")
    add("--cpu", action="store_true", help="gloo instead of a GPU")
    found = parser.parse_args(arguments)
    for name in ("steps", "samples", "micro_batches", "evaluations"):
        if getattr(found, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1")
    if found.arms[0] != BASELINE:
        parser.error(f"--arms: expected {BASELINE} first, found {found.arms[0]}")
    found.out, found.data = found.out.resolve(), found.data.resolve()
    try:
        text = Text.of(found.data)
    except DatasetError as error:
        parser.error(f"--data: {error}")
    found.eval_tokens = found.eval_tokens or min(EVAL_TOKENS, text.valid)
    found.method = Method(
        found.model, found.steps, found.samples, found.micro_batches, found.lr,
        found.evaluations, found.eval_tokens, text.digest,
    )  # fmt: skip
    if found.steps % found.method.eval_every:
        parser.error(f"--steps: expected a multiple of {found.method.eval_every}, the steps "
            f"between {found.evaluations} evaluations, found {found.steps}")  # fmt: skip
    if found.eval_tokens > text.valid:
        parser.error(f"--eval-tokens: expected at most {text.valid}, which {found.data} "
            f"has held out, found {found.eval_tokens}")  # fmt: skip
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and report; return 1 if a training failed, TIME_IS_UP if some are left, else 0."""
    asked = parse(arguments)
    asked.deadline = time.monotonic() + asked.budget
    try:
        hold_to_method(asked)
    except ValueError as error:
        print(f"gpu_losses: {error}", file=sys.stderr)
        return 2
    pairs = [
        left
        for pair in gpu_losses.pairs_of(asked.arms, asked.seeds)
        if (left := [case for case in pair if log_of(case, asked) is None])
    ]
    status = 0
    if pairs:
        os.environ.update(forked.environment(not asked.cpu))
        context = forked.server(asked.timeout)
        with sigterm_raises():
            status = run(asked, context, pairs)
    for name in asked.arms[1:]:
        say(verdict(name, asked))
    return status


def hold_to_method(asked: argparse.Namespace) -> None:
    """Raise ValueError if trainings in ``asked.out`` had other settings; else store these."""
    file, own = asked.out / "method.json", asdict(asked.method)
    if file.is_file():
        there = json.loads(file.read_text())
        wrong = [f"{n} {there.get(n)!r} there, {own[n]!r} here" for n in own if there[n] != own[n]]
        if wrong:
            raise ValueError(
                f"--out {asked.out}: its trainings differ ({'; '.join(wrong)}); give the same "
                "options, or name another folder"
            )
    asked.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(own) + "\n")


def log_of(case: Case, asked: argparse.Namespace) -> list[dict[str, Any]] | None:
    """Return the log of a finished training, None without one."""
    file = case.folder(asked.out) / "loss.jsonl"
    if not file.is_file():
        return None
    try:
        log = [json.loads(line) for line in file.read_text().splitlines()]
    except ValueError:  # cut off
        return None
    steps = [line["step"] for line in log if "step" in line]
    whole = steps == list(range(1, asked.method.steps + 1)) and "summary" in log[-1]
    return log if whole else None


def run(asked: argparse.Namespace, context: Any, pairs: Sequence[Sequence[Case]]) -> int:
    """Train the pairs that fit the time; return ``main``'s status."""
    lasted, failed = 0.0, 0
    for number, pair in enumerate(pairs):
        left = asked.deadline - time.monotonic()
        if left <= lasted + RESERVE_S:
            say(f"{left:.0f} s are left: {len(pairs) - number} pairs are for a later call")
            return TIME_IS_UP
        named, began = " and ".join(map(str, pair)), time.monotonic()
        try:
            train(asked, context, pair)
        except (forked.JobError, ValueError) as error:
            if asked.deadline - time.monotonic() <= 1:
                say(f"time is up: {named} ended")
                return TIME_IS_UP
            say(f"{named} FAILED: {error}")
            failed += 1
            if failed == FAILURES:
                say(f"{failed} pairs failed: no other one begins")
                return 1
            continue
        lasted = time.monotonic() - began
        say(f"{named}: over after {lasted:.1f} s")
    return int(failed > 0)


def train(asked: argparse.Namespace, context: Any, pair: Sequence[Case]) -> None:
    """Train the cases of a seed side by side.

    Raises JobError if a rank ends or times out, ValueError for an incomplete log.
    """
    jobs: list[forked.Job] = []
    try:
        for case in pair:
            shutil.rmtree(case.folder(asked.out), ignore_errors=True)
            specs = gpu_losses.specs_of(case, asked.method, asked)
            jobs.append(forked.Job.start(context, specs, _patience(asked)))
        for job in jobs:
            job.answers()
        for job in jobs:
            job.tell("go", asked.method.steps, False)
        for job in jobs:
            job.timeout = _patience(asked)
            job.answers()
    finally:
        for job in jobs:
            job.close()
    for case in pair:
        if log_of(case, asked) is None:
            raise ValueError(f"{case}: its log does not hold {asked.method.steps} steps, each once")


def _patience(asked: argparse.Namespace) -> float:
    """Return the seconds for which a rank may stay silent."""
    left: float = min(asked.timeout, asked.deadline - time.monotonic())
    return max(1.0, left)


def gaps(name: str, asked: argparse.Namespace) -> Iterator[float]:
    """Yield the loss gap in percent for each seed whose native and compressed runs are done."""
    for seed in asked.seeds:
        logs = [log_of(Case(one, seed), asked) for one in (BASELINE, name)]
        if all(logs):
            native, own = (
                np.array([line["valid_losses"] for line in log or () if "valid_losses" in line])
                for log in logs
            )
            yield float(100 * (own.mean(1) / native.mean(1) - 1).mean())


def verdict(name: str, asked: argparse.Namespace) -> str:
    """Describe the gap of an arm, its interval over the seeds, and whether it is at most AIM."""
    found = np.array(list(gaps(name, asked)))
    if len(found) < LEAST:
        return f"{name}: {len(found)} seeds have both trainings, an interval needs {LEAST}"
    gap, half = float(found.mean()), half_width(found) or 0.0
    word = "met" if gap + half <= AIM else "refuted" if gap - half > AIM else "undecided"
    return f"{name}: gap {gap:+.3f} ± {half:.3f} % over {len(found)} seeds; at most {AIM} %: {word}"


if __name__ == "__main__":
    sys.exit(main())
