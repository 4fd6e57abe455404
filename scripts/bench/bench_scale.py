#!/usr/bin/env python3
"""Measure what compression costs and brings from 2 to 4,096 ranks: without a wire, and planned.

    python scripts/bench/bench_scale.py host --out runs/scale
    python scripts/bench/bench_scale.py plans --out runs/scale
    python scripts/bench/bench_scale.py trainings --out runs/scale
    python scripts/bench/results.py --scale runs/scale

``host``: one rank's step of each engine by its seams, in a group of which only this rank is there
and whose messages arrive at once: the host's time, launches, messages, bytes, buffers, residuals
and what a checkpoint of them takes. ``plans``: steps of GPT-NeoX-20B and of a Llama of 70 B on 8 to
4,096 GPUs over three links, as the planner's model says, the host's time of messages in it.
``trainings``: that model against trainings of 2 to 16 ranks on this machine.

Each writes a file of its own into --out; rows of numbers that are asked for again are replaced.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here

from bench.scale_bench import figures, planned, trained
from bench.scale_bench.engines import ENGINES

RANKS, TRAINED = (2, 8, 64, 256, 1024, 4096), (2, 4, 8, 16)


def machine() -> str:
    """Describe what this ran on, as far as figures depend on it."""
    return f"Python {platform.python_version()}, torch {torch.__version__.partition('+')[0]}"


def kept(path: Path, keys: Sequence[str], new: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add rows to ``path``, in place of those with the same ``keys``, after each; return all."""
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.is_file() else []
    for row in new:
        print(row, flush=True)
        own = [row[key] for key in keys]
        rows = [one for one in rows if [one[key] for key in keys] != own] + [row]
        text = json.dumps({"machine": machine(), "rows": rows}, indent=1)
        path.write_text(text + "\n", encoding="utf-8")
    return rows


def host(asked: argparse.Namespace) -> None:
    """Measure a step of every engine for all numbers of ranks."""
    torch.set_num_threads(1)
    found = (
        {"engine": name, "ranks": ranks, **figures.cost(name, ranks)._asdict()}
        for ranks in asked.ranks
        for name in asked.engines
    )
    kept(asked.out / "host.json", ("engine", "ranks"), found)


def plans(asked: argparse.Namespace) -> None:
    """Plan the models on all numbers of GPUs, over all links."""
    found = planned.rows(asked.models, asked.gpus, planned.RATES)
    kept(asked.out / "plans.json", ("model", "gpus", "gbits"), found)


def trainings(asked: argparse.Namespace) -> None:
    """Hold the model against trainings."""
    found = (
        row for ranks in asked.ranks for row in trained.compared(ranks, asked.seconds, asked.out)
    )
    kept(asked.out / "trainings.json", ("ranks", "name", "zero"), found)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the three."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    parts: dict[str, Callable[[argparse.Namespace], None]] = {
        "host": host, "plans": plans, "trainings": trainings
    }  # fmt: skip
    for name, run in parts.items():
        one = commands.add_parser(name)
        one.set_defaults(run=run)
        one.add_argument("--out", type=Path, default=Path("runs/scale"), metavar="FOLDER")
        if name == "plans":
            one.add_argument("--gpus", type=int, nargs="+", default=planned.GPUS)
            one.add_argument("--models", nargs="+", choices=planned.BATCHES,
                             default=list(planned.BATCHES))  # fmt: skip
            continue
        one.add_argument("--ranks", type=int, nargs="+",
                         default=RANKS if name == "host" else TRAINED)  # fmt: skip
        if name == "host":
            one.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
        else:
            one.add_argument("--seconds", type=float, default=40.0, help="of hybridcomp measure")
    asked = parser.parse_args(argv)
    least = min(asked.gpus) if asked.command == "plans" else min(asked.ranks)
    wanted = planned.PER_NODE if asked.command == "plans" else 2
    if least < wanted or (asked.command == "plans" and any(n % wanted for n in asked.gpus)):
        parser.error(f"expected {wanted} or more, of GPUs whole nodes of {wanted}; found {least}")
    asked.out.mkdir(parents=True, exist_ok=True)
    asked.run(asked)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
