#!/usr/bin/env python3
"""Run all measurements that need a GPU, in one resumable command.

    prove_on_gpu.py --out runs/gpu                # all, about six hours on an H100
    prove_on_gpu.py --out runs/gpu --list         # the steps, and which are done
    prove_on_gpu.py --out runs/gpu --only tests codecs
    prove_on_gpu.py --out runs/gpu --minutes 9    # as much as fits; call it again
    prove_on_gpu.py --out runs/gpu --dry-run      # the commands
    prove_on_gpu.py --out runs/cpu --cpu          # all of it small, without a GPU

Needs one GPU with 80 GB and hybridcomp[cuda13,deepspeed,dev,megatron,plot], or cuda12. Every step
is a command whose output goes to OUT/NAME.log; test steps run in parallel. The most informative
steps come first. A successful step is not repeated (--again repeats it); a failed step is reported,
the next one begins, and another call repeats it last. With --minutes, steps that do not fit the
time left are postponed, resumable steps stop in time and continue in the next call, and others are
ended where they take half as long again as planned. --pack is written whenever a step has ended.
docs/results/gpu_proof.md lists the expected figures and which were ever measured.

On a machine that is lent bare for minutes, without a network:

    prepare_gpu.py --out carry --python python3.12 --architecture 90    # before, here
    prove_on_gpu.py --out /tmp/gpu --prepared carry --minutes 9 --pack one.tar.gz
    prove_on_gpu.py --out /tmp/gpu --prepared carry --minutes 4 --pack two.tar.gz \\
        --unpack one.tar.gz                          # goes on, on another machine
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here

from benchmarks.gpu_proof import carried
from benchmarks.gpu_proof.running import RECORD, ROOT, Record, Running, deadline_of
from benchmarks.gpu_proof.steps import Lister, Step
from benchmarks.shared import parser_of
from lab.team import sigterm_raises

#: maximum bytes of the --pack file
MOST_PACKED = 15_000_000


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/gpu"), metavar="FOLDER")
    add("--only", nargs="+", metavar="NAME", help="steps that begin with one")
    add("--again", action="store_true", help="also what is done")
    add("--minutes", type=float, default=math.inf, metavar="M", help="of this call")
    add("--cpu", action="store_true", help="small, over gloo, to try all of it without a GPU")
    add("--prepared", type=Path, metavar="FOLDER", help="what prepare_gpu.py has written")
    add("--unpack", type=Path, metavar="FILE", help="of --pack: go on with its results")
    add("--pack", type=Path, metavar="FILE", help="write the results there too, .tar.gz")
    add("--list", action="store_true", help="run nothing, show the steps")
    add("--dry-run", action="store_true", help="run nothing, show the commands")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps left; return 1 if a step failed or is left for another call."""
    asked = parse(arguments)
    out, deadline = asked.out.resolve(), deadline_of(asked.minutes)
    try:
        if asked.unpack is not None:
            carried.unpack(asked.unpack, out)
        if asked.prepared is not None:
            out.mkdir(parents=True, exist_ok=True)
            os.environ.update(carried.install(asked.prepared.resolve(), out, ROOT))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    record = Record(out / RECORD)
    every = list(Lister(out, asked.cpu).steps())
    chosen = [step for step in every if not asked.only or step.name.startswith(tuple(asked.only))]
    todo = [step for step in chosen if asked.again or not record.is_done(step)]
    todo.sort(key=record.has_failed)  # the same code fails again: first what has not run
    if asked.list or asked.dry_run:
        _show(chosen if asked.list else todo, record, asked.dry_run)
        return 0
    out.mkdir(parents=True, exist_ok=True)

    def keep() -> None:
        if asked.pack is not None:
            for line in carried.pack(out, asked.pack.resolve(), MOST_PACKED):
                print(line, file=sys.stderr)

    running = Running(out, record, deadline, keep)
    try:
        with sigterm_raises():  # ends the running step with the call
            running.run(todo)
    finally:
        keep()
    for names, what in (
        (running.failed, "failed, and tried again by the same command"),
        (running.later, "for the next call, by the same command"),
    ):
        if names:
            print(f"{what}: {', '.join(names)}", file=sys.stderr)
    return int(bool(running.failed or running.later))


def _show(steps: Sequence[Step], record: Record, commands: bool) -> None:
    for step in steps:
        mark = "done" if record.is_done(step) else f"~{step.minutes:g} min"
        print(shlex.join(step.command) if commands else f"{step.name:22} {mark:8} {step.shows}")


if __name__ == "__main__":
    sys.exit(main())
