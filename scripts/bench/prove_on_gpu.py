#!/usr/bin/env python3
"""Measure everything that only a GPU can tell, in one command that goes on where it was cut off.

    scripts/bench/prove_on_gpu.py --out runs/gpu                # all, about six hours on an H100
    scripts/bench/prove_on_gpu.py --out runs/gpu --list         # the steps, and which are done
    scripts/bench/prove_on_gpu.py --out runs/gpu --only tests codecs
    scripts/bench/prove_on_gpu.py --out runs/gpu --minutes 9    # as much as fits; call it again
    scripts/bench/prove_on_gpu.py --out runs/gpu --dry-run      # the commands

Needs one GPU with 80 GB and hybridcomp[cuda13,deepspeed,dev,megatron,plot], or cuda12. Every step
is a command of its own whose output is kept in OUT/NAME.log. A step that succeeded is not repeated
(--again does); one that failed is told and the next one begins. With --minutes a step that would
take longer than what is left is put off, those that can stop do so in time and go on in the next
call, and whatever still runs at the end is ended. What the figures should be stands
in docs/results/gpu_proof.md, which says of each whether it was ever measured. The last step writes
the chapter to OUT/pages.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: those of bench_gpu_training.py; each is a step, so that little is lost where a machine is
LAYOUTS = (
    "zero1", "zero3", "dp2", "zero2", "tp2", "pp2", "tp2pp2", "dp2pp2", "asymmetric", "3d",
)  # fmt: skip
#: lines of a failed step that are shown, and what marks those of a good one that are
TAIL, MARKS = 12, ("FAILED", "MISSED")
#: folders and files with tests for a GPU; each is a step, of which none takes ten minutes
TESTS = {
    "kernels": ("tests/kernels/cuda", "tests/measure", "tests/nn", "tests/commands/test_doctor.py"),
    "devices": ("tests/training/test_devices.py",),
    "zero": ("tests/nccl/test_zero.py",),
    "mcore": ("tests/nccl/test_mcore.py",),
    "pipe": ("tests/nccl/test_pipe.py",),
    "example": ("tests/nccl/test_example.py",),
    "nccl": (
        "tests/nccl", "--ignore=tests/nccl/test_zero.py", "--ignore=tests/nccl/test_mcore.py",
        "--ignore=tests/nccl/test_pipe.py", "--ignore=tests/nccl/test_example.py",
    ),
}  # fmt: skip
#: exit status of a step that stopped in time and has more to do, as the benches have it
TIME_IS_UP = 75
#: seconds that a step that stops in time may need to do so, and fewest that are worth a start
STOPPING_S, LEAST_S = 45.0, 150.0
#: seconds that one has to say what it saw whose time is over
FAREWELL_S = 8.0


@dataclass(frozen=True)
class Step:
    """One command; ``shows``: which figures come from it; ``minutes``: about how long it takes.

    ``budget``: its option for the seconds after which it stops, where it goes on in another call;
    ``short``: more options where a call's time is limited; ``renewed``: made again of what other
    steps have found since.
    """

    name: str
    shows: str
    minutes: float
    command: tuple[str, ...]
    budget: str = ""
    short: tuple[str, ...] = ()
    renewed: bool = False

    def begins(self, left: float) -> bool:
        """Return whether ``left`` seconds are enough to begin the step."""
        return left >= (LEAST_S if self.budget else 60 * self.minutes)

    def words(self, left: float) -> tuple[str, ...]:
        """Return the command, for ``left`` seconds."""
        if not self.budget or math.isinf(left):
            return self.command
        seconds = max(left - STOPPING_S, left / 2)
        return (*self.command, *self.short, self.budget, f"{seconds:.0f}")


def steps(out: Path) -> Iterator[Step]:
    """Return all steps in their order: what is short and tells most comes first."""
    python = sys.executable

    def bench(name: str, *words: str | Path) -> tuple[str, ...]:
        return (python, f"scripts/bench/{name}.py", *map(str, words))

    yield Step("doctor", "driver, torch, CuPy and NVRTC fit together", 1,
               (python, "-m", "hybridcomp.commands.cli", "doctor"))  # fmt: skip
    for name, places in TESTS.items():
        yield Step(f"tests-{name}", "pytest -m gpu is green, under 10 minutes in all", 3,
                   (python, "-m", "pytest", "-m", "gpu", "-q", *places))  # fmt: skip
    codecs = bench(
        "bench_gpu", "--no-tests", "--seconds", "420", "--md", out / "gpu_codecs.md",
        "--json", out / "gpu_codecs.json", "--png", out / "gpu_codecs.png",
    )  # fmt: skip
    yield Step("codecs", "shares of a copy, small messages, peers; the size exchange", 6, codecs)
    yield Step("offload", "offload at least 1.15, or native by auto", 3,
               bench("bench_offload", "--json", out / "offload.json"))  # fmt: skip
    text, bpe = out / "data" / "text", out / "data" / "gpt2"
    yield Step("text", "data of the speed", 1,
               (python, "scripts/prepare_data.py", "--output", str(text)))  # fmt: skip
    for size, more, minutes in (("85M", (), 15), ("350M", ("--beside", "4"), 20)):
        for layout in LAYOUTS:
            speed = bench(
                "bench_gpu_training", "--size", size, "--layouts", layout, "--data", text,
                "--out", out / f"{size}.jsonl", "--resume", *more,
            )  # fmt: skip
            shows = "of what its bytes allow at least 0.90, auto of the better at least 0.97"
            yield Step(f"speed-{size}-{layout}", shows, minutes, speed, "--budget")
    vocabulary = (python, "scripts/prepare_data.py", *_sources(), "--suffix", ".py")
    yield Step("bpe", "data of the losses", 3,
               (*vocabulary, "--vocabulary", "50257", "--output", str(bpe)))  # fmt: skip
    losses = ("--data", bpe, "--steps", "1000", "--seeds", "0", "1", "2", "--out", out / "losses")
    yield Step("losses", "gap at most 0.1 % for recommended, 0 for lossless", 90,
               bench("gpu_losses", *losses), "--budget", ("--beside", "3"))  # fmt: skip
    yield Step("pages", "the chapter of docs/results", 1,
               bench("results", "--gpu", out, "--out", out / "pages"), renewed=True)  # fmt: skip


def _sources() -> list[str]:
    """Return folders of Python source: the standard library's, torch's, DeepSpeed's."""
    found = [sysconfig.get_paths()["stdlib"]]
    for package in ("torch", "deepspeed"):
        spec = find_spec(package)
        if spec is not None and spec.origin:
            found.append(str(Path(spec.origin).parent))
    return found


class Record:
    """File of the steps that were run, how they ended and how long they took."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found: dict[str, dict[str, Any]] = (
            json.loads(path.read_text()) if path.is_file() else {}
        )

    def is_done(self, step: Step) -> bool:
        """Return whether the same command has succeeded before."""
        found = self.found.get(step.name, {})
        return found.get("done") is True and found.get("command") == list(step.command)

    def put(self, step: Step, status: int, seconds: float) -> None:
        """Write down how a step ended."""
        self.found[step.name] = {
            "done": status == 0, "status": status, "seconds": round(seconds, 1),
            "command": list(step.command),
        }  # fmt: skip
        partial = self._path.with_suffix(".part")
        partial.write_text(json.dumps(self.found, indent=1) + "\n")
        partial.replace(self._path)


def run(step: Step, log: Path, left: float = math.inf) -> int:
    """Run it for at most ``left`` seconds, keep what it prints, show some; its exit status."""
    last, marked = deque[str](maxlen=TAIL), deque[str](maxlen=TAIL)
    words = step.words(left)
    with log.open("a") as kept:  # of a step that goes on, all calls
        kept.write(f"$ {shlex.join(words)}\n")
        process = subprocess.Popen(
            words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", preexec_fn=os.setpgrp,
        )  # fmt: skip
        assert process.stdout is not None
        alarm = threading.Timer(min(left, threading.TIMEOUT_MAX), _end, (process, step.name))
        alarm.daemon = True
        alarm.start()
        try:
            for line in process.stdout:
                kept.write(line)
                kept.flush()
                last.append(line)
                if any(mark in line for mark in MARKS):
                    marked.append(line)
            status = process.wait()
        finally:
            alarm.cancel()
            _end(process)
    sys.stdout.writelines(f"    {line}" for line in (last if status else marked))
    return status


def _end(process: subprocess.Popen[str], late: str = "") -> None:
    """End the process, unless it has ended, and what it started; ``late``: the step's name."""
    if late:
        print(f"    {late} still runs, and its time is over", flush=True)
        process.send_signal(signal.SIGINT)  # pytest tells what it has seen
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(FAREWELL_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="FOLDER")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="steps that begin with one")
    parser.add_argument("--again", action="store_true", help="also what is done")
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="M", help="of this call")
    parser.add_argument("--list", action="store_true", help="run nothing, show the steps")
    parser.add_argument("--dry-run", action="store_true", help="run nothing, show the commands")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is not done yet; 1 where something failed."""
    asked = parse(arguments)
    out = asked.out.resolve()
    record = Record(out / "proof.json")
    chosen = [s for s in steps(out) if not asked.only or s.name.startswith(tuple(asked.only))]
    todo = [s for s in chosen if asked.again or not record.is_done(s)]
    if todo:
        todo = [s for s in chosen if s in todo or s.renewed]
    if asked.list or asked.dry_run:
        for step in chosen if asked.list else todo:
            mark = "done" if record.is_done(step) else f"~{step.minutes:g} min"
            print(shlex.join(step.command) if asked.dry_run else
                  f"{step.name:22} {mark:8} {step.shows}")  # fmt: skip
        return 0
    out.mkdir(parents=True, exist_ok=True)
    # a step is ended with the call, whoever ends it
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        return _prove(todo, record, out, time.monotonic() + 60 * asked.minutes)
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminated(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _prove(todo: Sequence[Step], record: Record, out: Path, deadline: float) -> int:
    """Run ``todo`` until ``deadline`` (``time.monotonic``); the exit status."""
    failed, later, begun = [], [], False
    for number, step in enumerate(todo, 1):
        left = deadline - time.monotonic()
        # what takes longer than a whole call is tried all the same, at the beginning of one
        if not step.begins(left) and begun:
            later.append(step.name)
            continue
        minutes = sum(one.minutes for one in todo[number - 1 :])
        print(f"[{number}/{len(todo)}] {step.name} (~{step.minutes:g} of ~{minutes:g} min left): "
              f"{step.shows}", flush=True)  # fmt: skip
        began, begun = time.monotonic(), True
        status = run(step, out / f"{step.name}.log", left)
        record.put(step, status, time.monotonic() - began)
        if status == TIME_IS_UP:
            later.append(step.name)
        elif not record.is_done(step):
            failed.append(step.name)
            print(f"    failed with status {status}: {out / step.name}.log", flush=True)
    if failed:
        print(f"failed, and tried again by the same command: {', '.join(failed)}", file=sys.stderr)
    if later:
        print(f"for the next call, by the same command: {', '.join(later)}", file=sys.stderr)
    return int(bool(failed or later))


if __name__ == "__main__":
    sys.exit(main())
