#!/usr/bin/env python3
"""Measure the loss gap of compression at the size of GPT-2 small, on one GPU.

scripts/examples/prepare_data.py FOLDER ... --suffix .py --vocabulary 50257 --max-bytes 90000000 \\
    --valid-fraction 0.04 --output data/gpt2
scripts/benchmarks/gpu_losses.py --data data/gpt2 --budget 480 --out runs/gpu/losses

124 M parameters in bf16 under ZeRO 1 on two ranks, which exchange bytes through GPU memory
(training_bench/gpu_memory.py) and get the same sums as over NCCL.

A pair is the native and the compressed training of one seed, started together with the same weights
and data. Held-out loss is evaluated --evaluations times in the last fifth of the steps; a seed's
gap is the mean over them, and the interval is over seeds. A call starts only pairs that fit its
--budget and keeps one small file per finished pair in --out. It exits with 75 while seeds are
missing; run the same command again to continue.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))  # gpt, train_gpt

from gpt.indexed import DatasetError

from benchmarks.training_bench import forked, gpu_losses, loss_gaps, loss_records
from benchmarks.training_bench.gpu_losses import BASELINE, Case, Method, Text
from benchmarks.training_bench.loss_runner import Runner

#: held-out tokens per evaluation
EVAL_TOKENS = 2**19
#: exit status if --budget ran out; the same command runs the remaining trainings
TIME_IS_UP = 75


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; adds ``method`` and ``text``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    add("--logs", type=Path, metavar="FOLDER", help="of what is not kept; default: OUT.logs")
    add("--cpu", action="store_true", help="gloo instead of a GPU")
    found = parser.parse_args(arguments)
    for name in ("steps", "samples", "micro_batches", "evaluations"):
        if getattr(found, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1")
    if found.arms[0] != BASELINE:
        parser.error(f"--arms: expected {BASELINE} first, found {found.arms[0]}")
    found.out, found.data = found.out.resolve(), found.data.resolve()
    found.logs = (found.logs or found.out.with_name(f"{found.out.name}.logs")).resolve()
    try:
        found.text = Text.of(found.data)
    except DatasetError as error:
        parser.error(f"--data: {error}")
    found.eval_tokens = found.eval_tokens or min(EVAL_TOKENS, found.text.valid)
    found.method = _method(found)
    if found.steps % found.method.eval_every:
        parser.error(f"--steps: expected a multiple of {found.method.eval_every}, the steps "
            f"between {found.evaluations} evaluations, found {found.steps}")  # fmt: skip
    if found.eval_tokens > found.text.valid:
        parser.error(f"--eval-tokens: expected at most {found.text.valid}, which {found.data} "
            f"has held out, found {found.eval_tokens}")  # fmt: skip
    return found


def _method(asked: argparse.Namespace) -> Method:
    return Method(
        asked.model, asked.steps, asked.samples, asked.micro_batches, asked.lr,
        asked.evaluations, asked.eval_tokens, asked.text.digest,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and report; return 1 if a training failed, TIME_IS_UP if some are left, else 0."""
    asked = parse(arguments)
    began = time.monotonic()
    asked.deadline = began + asked.budget
    records = loss_records.kept(asked.out, _say)
    try:
        _held_to(asked, records)
    except ValueError as error:
        print(f"gpu_losses: {error}", file=sys.stderr)
        return 2
    turns = [
        left
        for turn in gpu_losses.turns_of(asked.arms, asked.seeds)
        if (left := tuple(case for case in turn if case not in records))
    ]
    status, method = 0, asked.method
    if turns:
        times = method.steps * method.tokens_per_step / asked.text.train
        _say(f"the text is read {times:.2f} times; held out are {method.eval_tokens:,} tokens")
        os.environ.update(forked.environment(not asked.cpu))
        context = forked.server(asked.timeout, _say)
        took = max((sum(one["seconds"].values()) for one in records.values()), default=0.0)
        runner = Runner(asked, method, context, turns, _say, took)
        before = signal.signal(signal.SIGTERM, _terminated)  # so that SIGTERM ends the ranks too
        try:
            runner.run()
        finally:
            signal.signal(signal.SIGTERM, before)
        status = 1 if runner.failed else TIME_IS_UP if runner.time_is_up else 0
        records = loss_records.kept(asked.out, _say)
    for line in verdicts(records):
        _say(line)
    _say(f"over after {time.monotonic() - began:.1f} s")
    return status


def _held_to(asked: argparse.Namespace, records: Mapping[Case, loss_records.Record]) -> None:
    """Raise ValueError if kept trainings used another method."""
    for case, record in records.items():
        if wrong := asked.method.differences(record["method"]):
            raise ValueError(
                f"--out {asked.out}: {case} was trained in another way ({'; '.join(wrong)}); give "
                "the same options, or name another folder"
            )


def verdicts(records: Mapping[Case, loss_records.Record]) -> list[str]:
    """Print each arm's gap to native, and whether it decides."""
    lines = []
    runs = loss_records.by_arm(records)
    native = runs.pop(BASELINE, {})
    for name, own in runs.items():
        try:
            found = loss_gaps.of(native, own)
        except loss_gaps.GapError as error:
            lines.append(f"{name}: {error}")
        else:
            lines.append(f"{name}: {found.told(loss_records.pair_seconds(own))}")
    return lines


def _terminated(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
