#!/usr/bin/env python3
"""Train the example on two sites over slow links, and say how long it takes to an equal loss.

    python scripts/bench/bench_sites.py --data data/text           # as root, 15 minutes

Two namespaces of two ranks each; what leaves a site has the link's rate (scripts/netlab.py). On
each link all cases are trained by the same processes: DeepSpeed by itself, 4 bits every step,
DiLoCo with 4 bits, streaming, and SparseLoCo. A case ends after ``--steps`` or ``--seconds``. The
time to a loss is that at which the mean of 30 steps reaches it first; "an equal loss" is the lowest
that all cases reach, and the lowest that all but the native one reach. DiLoCo and streaming with
fp32 messages train for a few meetings only, for the time that these wait. A case that is finished
is not repeated: started again, the bench goes on where it was cut off. ``--only-tables``: no
training.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here

from bench.sites_bench import curves
from bench.sites_bench.rank import SitesJob, rank_main
from hybridcomp.config import IslandConfig
from lab.cluster import Lab
from lab.layout import LabError, Layout, Rates, parse_rate

ROOT = Path(__file__).resolve().parents[2]
#: seconds in which the ranks start, and make an engine for each case
START_S, CASE_S = 300.0, 60.0
#: meetings of the cases that are trained for their waits alone
FEW = 4
FED_BACK = {"codec": "blockint", "bits": 4, "error_feedback": True}


def blocks(every: int, site: int) -> dict[str, dict[str, Any] | None]:
    """Return the cases; ``site`` ranks each are an island."""

    def islands(preset: str, **more: Any) -> dict[str, Any]:
        return {"sync": {"preset": preset, "islands": site, "every": every, **more}}

    return {
        curves.NATIVE: None,
        curves.EVERY_STEP: {"dp": FED_BACK},
        curves.PLAIN: islands("diloco", **FED_BACK),
        curves.STREAMING: islands("streaming"),
        "sparseloco": islands("sparseloco"),
        curves.PLAIN_FP32: islands("diloco"),
        curves.STREAMING_FP32: islands("streaming", codec="none", error_feedback=False),
    }


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the committed file of ZeRO 0, whose gradients are all that is sent, at this rate."""
    found: dict[str, Any] = json.loads((ROOT / "configs/ds_zero0_baseline.json").read_text())
    found["train_micro_batch_size_per_gpu"] = args.batch
    found["steps_per_print"] = 10**9
    found["optimizer"]["params"]["lr"] = args.lr
    found["scheduler"] = {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": args.lr, "warmup_num_steps": max(2, args.warmup)},
    }
    return found


def job_of(args: argparse.Namespace, out: Path) -> SitesJob:
    """Return what the ranks of one link train, all cases."""
    from gpt.data import Samples
    from gpt.indexed import IndexedTokens

    file = args.data.with_name(f"{args.data.name}_train")
    vocabulary = Samples(IndexedTokens(file), args.length, 0).vocabulary
    model = {"vocabulary": vocabulary, "layers": args.layers, "width": args.width, "heads": 4}
    ranks = Layout.parse(args.layout).ranks
    few = dict.fromkeys((curves.PLAIN_FP32, curves.STREAMING_FP32), FEW * args.every)
    return SitesJob(
        blocks=blocks(args.every, ranks), settings=settings_of(args), few=few, steps=args.steps,
        seconds=args.seconds, length=args.length, model=model, seed=args.seed,
        data=str(args.data), out=str(out),
    )  # fmt: skip


def missing(job: SitesJob) -> list[str]:
    """Return the cases that are not finished with these settings."""
    found = []
    for name in job.blocks:
        file = Path(job.out, f"{name}.json")
        told = json.loads(file.read_text())["told"] if file.is_file() else None
        if told != json.loads(json.dumps(job.told(name))):
            found.append(name)
    return found


def measure(args: argparse.Namespace, rate: str) -> int:
    """Train what is missing on one link; return the exit status. Raises LabError."""
    out: Path = args.out / rate
    out.mkdir(parents=True, exist_ok=True)
    job = job_of(args, out)
    names = missing(job)
    print(f"{rate}: {len(names)} of {len(job.blocks)} cases to train", flush=True)
    if not names:
        return 0
    job = replace(job, blocks={name: job.blocks[name] for name in names})
    file = args.out / f"{rate}.job"
    job.write(file)
    limit = START_S + len(names) * (args.seconds + CASE_S)
    given = os.environ.get("PYTHONPATH")
    env = {
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *([given] if given else [])]),
    }
    with Lab(Layout.parse(args.layout), Rates(parse_rate(rate))) as lab:
        words = [sys.executable, str(Path(__file__).resolve()), "--rank-of", str(file)]
        result = lab.run(words, env=env, timeout=limit, echo="first")
    if result.status:
        print("\n".join(text[-2000:] for text in result.outputs), file=sys.stderr)
        print(f"bench_sites: {rate}: a rank ended with {result.status}", file=sys.stderr)
    return result.status


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rates", nargs="+", default=["50mbit", "1gbit", "10gbit"])
    add("--layout", default="2x2", help="sites x ranks of a site")
    add("--steps", type=int, default=600, help="of a case, at most")
    add("--seconds", type=float, default=42.0, help="of a case, at most")
    add("--every", type=int, default=30, help="steps between meetings")
    add("--batch", type=int, default=1, help="samples of a rank in a step")
    add("--lr", type=float, default=1e-3)
    add("--warmup", type=int, default=30, help="steps")
    add("--length", type=int, default=128)
    add("--layers", type=int, default=4)
    add("--width", type=int, default=128)
    add("--seed", type=int, default=0)
    add("--data", type=Path, default=Path("data/text"), metavar="PREFIX")
    add("--out", type=Path, default=Path("runs/loss_study/sites"), metavar="FOLDER")
    add("--only-tables", action="store_true", help="of what is there")
    add("--rank-of", type=Path, help=argparse.SUPPRESS)
    found = parser.parse_args(argv)
    delay = IslandConfig.model_validate({"preset": "streaming"}).delay
    if found.every <= delay:
        parser.error(f"--every {found.every}: expected more than the delay of streaming, {delay}")
    found.out, found.data = found.out.resolve(), found.data.resolve()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is missing, print the tables; return the exit status."""
    args = parse(argv)
    if args.rank_of is not None:
        rank_main(args.rank_of)
        return 0
    begun = time.monotonic()
    try:
        for rate in () if args.only_tables else args.rates:
            if status := measure(args, rate):
                return status
            print(f"{rate}: there after {time.monotonic() - begun:.0f} s", flush=True)
    except (LabError, OSError) as error:
        print(f"bench_sites: {error}", file=sys.stderr)
        return 2
    print("\n".join(curves.tables(curves.links(args.out))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
