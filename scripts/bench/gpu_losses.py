#!/usr/bin/env python3
"""Measure what compression costs in loss at the size of GPT-2 small, many trainings on one GPU.

scripts/prepare_data.py FOLDER ... --suffix .py --vocabulary 50257 --output data/gpt2
scripts/bench/gpu_losses.py --data data/gpt2 --seeds 0 1 2 --out runs/gpu_losses
scripts/bench/results.py --gpu runs/gpu

124 M parameters, bf16, ZeRO 1 on two ranks, which exchange their bytes through the GPU's memory
(training_bench/gpu_memory.py): with the same sums as over NCCL, but without its wire. --transport
"" takes NCCL's sockets. Finished runs are not repeated; the most telling ones come first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here

import one_gpu
from bench.training_bench import forked, gpu_losses
from bench.training_bench.forked import Job, JobError

#: exit status where --budget was over first: the same command goes on with what is not over
TIME_IS_UP = 75
#: seconds of --budget that are kept for what comes after the last step
RESERVE_S = 25.0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=1000)
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--arms", nargs="+", choices=list(gpu_losses.BLOCKS), default=list(gpu_losses.BLOCKS))
    add("--seed-by-seed", action="store_true", help="not arm by arm")
    add("--lr", type=float, default=3e-4)
    add("--tiny", action="store_true", help="a model that a CPU trains, to try the script itself")
    add("--samples", type=int, default=1, help="of 1024 tokens, of a rank in a step")
    add("--beside", type=int, default=8, metavar="N", help="trainings at once")
    add("--budget", type=float, default=1e9, metavar="S", help="what is not over then is ended")
    add("--fit", type=int, default=0, metavar="N", help="after N: fewer --steps, if --budget asks")
    add("--timeout", type=float, default=300.0, metavar="S", help="of the start")
    add("--nccl-steps", type=int, default=20, metavar="N",
        help="of the first two arms over NCCL's sockets too, 0: none")  # fmt: skip
    add("--transport", default="gpu_memory")
    add("--data", type=Path, default=Path("data/gpt2"), metavar="PREFIX")
    add("--out", type=Path, default=Path("runs/gpu_losses"), metavar="FOLDER")
    add("--logs", type=Path, metavar="FOLDER", help="of the ranks; default: --out")
    add("--cpu", action="store_true", help="gloo instead of a GPU")
    found = parser.parse_args(arguments)
    found.measured = None
    found.out, found.data = found.out.resolve(), found.data.resolve()
    found.logs = (found.logs or found.out).resolve()
    if not found.data.with_name(f"{found.data.name}_train.idx").is_file():
        parser.error(f"--data: no dataset {found.data}; scripts/prepare_data.py writes one")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 where a training failed, TIME_IS_UP where some are not over."""
    asked = parse(arguments)
    began = time.monotonic()
    os.environ.update(forked.environment(not asked.cpu))
    context = forked.server(asked.timeout, _say)
    cases = [case for case in gpu_losses.cases_of(asked) if not case.finished(asked.out)]
    running: dict[gpu_losses.Case, Job] = {}
    failed, time_is_up = 0, False
    try:
        while cases or running:
            while cases and len(running) < asked.beside:
                case = cases.pop(0)
                specs = gpu_losses.specs_of(case, asked, one_gpu.free_port())
                running[case] = Job.start(context, specs, asked.timeout)
            left = began + asked.budget - time.monotonic()
            if left <= 0:
                _say(f"time is up: {len(running)} trainings are ended, {len(cases)} never began")
                time_is_up = True
                break
            for case in _heard(running, min(left, 5.0)):
                if case in running:
                    failed += not _go_on(case, running, asked)
                    cases = [*_too_slow(case, running, asked, began), *cases]
    finally:
        for case, job in running.items():
            gpu_losses.keep(case, asked, finished=False)
            job.close()
    _say(f"over after {time.monotonic() - began:.1f} s")
    return 1 if failed else TIME_IS_UP if time_is_up else 0


def _too_slow(
    case: gpu_losses.Case, running: dict[gpu_losses.Case, Job], asked: Any, began: float
) -> list[gpu_losses.Case]:
    """End all trainings, to begin again shorter, where ``--fit`` says that none ends in time."""
    seconds = asked.measured
    if not asked.fit or seconds is None:
        return []
    asked.fit = 0
    room = asked.budget - (time.monotonic() - began) - RESERVE_S
    if asked.steps * seconds <= room:
        return []
    asked.steps = max(100, int(room / seconds) // 100 * 100)
    _say(f"{case}: {seconds * 1e3:.0f} ms a step, so all take {asked.steps} steps")
    for job in running.values():
        job.close()
    again = list(running)
    running.clear()
    return again


def _heard(running: dict[gpu_losses.Case, Job], seconds: float) -> list[gpu_losses.Case]:
    """Return trainings whose ranks have sent something."""
    pipes = {id(pipe): case for case, job in running.items() for pipe in job.pipes}
    ready = wait([pipe for job in running.values() for pipe in job.pipes], seconds)
    return list(dict.fromkeys(pipes[id(pipe)] for pipe in ready))


def _go_on(case: gpu_losses.Case, running: dict[gpu_losses.Case, Job], asked: Any) -> bool:
    """Hear all ranks of a training: let it begin, or write down that it is over; False: failed."""
    job = running[case]
    try:
        words = job.answers()
        if words[0] == ("steps", []):
            _say(f"{case} begins")
            wanted = asked.nccl_steps if case.nccl else asked.steps
            job.tell("go", min(wanted, asked.fit) if asked.fit else wanted, False)
            return True
        done = words[0][1] if words[0][0] == "steps" else []
        if done and not case.nccl and len(done) < asked.steps:
            asked.measured = statistics.median(step["seconds"] for step in done[-10:])
            job.tell("go", asked.steps - len(done), False)
            return True
    except JobError as error:
        _say(f"{case} FAILED: {error}")
        finished = False
    else:
        finished = True
        _say(f"{case}: {gpu_losses.summary(case, asked)}")
    gpu_losses.keep(case, asked, finished)
    job.close()
    del running[case]
    return finished


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
