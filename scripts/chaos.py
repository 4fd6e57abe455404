#!/usr/bin/env python3
"""Kill, stop, pause and restart ranks of compressed trainings; fill disks; damage checkpoints.

    python scripts/chaos.py                              # 100 seeded runs, 5 to 15 minutes
    python scripts/chaos.py --runs 10 --launcher deepspeed
    python scripts/chaos.py --first 17 --runs 1 --show   # repeat a run and show its output

Each run is a training of eight steps with two or three ranks (``fuzzing/trainer.py``), started by
torchrun's agent or by the launcher itself. docs/faults.md says how each must end and with which
message. The exit status is 1 if a run ended otherwise; its output is kept in ``--keep``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerContext
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from fuzzing import jobs, strikes  # noqa: E402


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=100, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="seed of the first run")
    parser.add_argument("--launcher", choices=jobs.LAUNCHERS, default="agent")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="jobs side by side")
    parser.add_argument("--only", choices=list(strikes.KINDS), help="runs of this kind")
    parser.add_argument("--keep", type=Path, default=Path("chaos-failures"), metavar="FOLDER")
    parser.add_argument("--show", action="store_true", help="print the output of every run")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run; return the exit status."""
    args = arguments(argv)
    context = jobs.server()
    with tempfile.TemporaryDirectory(prefix="chaos") as folder:
        checkpoint = whole_checkpoint(Path(folder, "whole"), context)
        chosen: list[tuple[int, strikes.Strike]] = []
        seed = args.first
        while len(chosen) < args.runs:
            strike = strikes.make(seed, checkpoint)
            if args.only in (None, strike.kind) and fits(strike, args.launcher):
                chosen.append((seed, strike))
            seed += 1

        def one(pair: tuple[int, strikes.Strike]) -> tuple[int, strikes.Outcome]:
            number, strike = pair
            return number, strikes.run(strike, Path(folder, str(number)), args.launcher, context)

        with ThreadPoolExecutor(args.at_once) as pool:
            failed = sum([told(*found, args) for found in pool.map(one, chosen)])
    kinds = Counter(strike.kind for _, strike in chosen)
    print(
        f"{len(chosen)} runs ({args.launcher}): {failed} ended otherwise than they must; ", end=""
    )
    print(", ".join(f"{kind} {count}" for kind, count in kinds.items()))
    return 1 if failed else 0


def fits(strike: strikes.Strike, launcher: str) -> bool:
    """Return whether the launcher supports the strike: DeepSpeed's does not restart ranks."""
    return launcher != "deepspeed" or strike.kind != "restart"


def whole_checkpoint(folder: Path, context: ForkServerContext) -> Path:
    """Make the checkpoints of an undisturbed training."""
    settings = {"stage": 2, "timeout": 60, "save_every": 2, "steps": 4}
    job = jobs.Job(folder, settings, "agent", context)
    if not job.wait(180) or job.code != 0:
        job.end()
        raise SystemExit(f"chaos: a training that nothing was done to failed:\n{job.text}")
    return folder / "checkpoints"


def told(seed: int, outcome: strikes.Outcome, args: argparse.Namespace) -> bool:
    """Print and store a run's outcome; return whether it failed."""
    strike = outcome.strike
    print(
        f"{time.strftime('%H:%M:%S')} run {seed}: {strike.kind}, rank {strike.rank} of "
        f"{strike.settings['ranks']} at step {strike.step}, stage {strike.settings['stage']}: "
        f"{'; '.join(outcome.problems) or 'as it must'} ({outcome.seconds:.1f} s)",
        flush=True,
    )
    if args.show:
        print(outcome.text)
    if outcome.problems:
        args.keep.mkdir(parents=True, exist_ok=True)
        (args.keep / f"{args.launcher}-{seed}.txt").write_text(outcome.text)
    return bool(outcome.problems)


if __name__ == "__main__":
    sys.exit(main())
