"""Run steps one after the other or in parallel, within the time of a call."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.gpu_proof.steps import Step
from benchmarks.shared import TIME_IS_UP

ROOT = Path(__file__).resolve().parents[3]
#: last lines shown of a failed step; of a successful step, the lines with one of MARKS are shown
TAIL, MARKS = 12, ("FAILED", "MISSED")
#: seconds in which a step whose time is up can print its results
FAREWELL_S = 8.0
#: name of the file that records how steps ended
RECORD = "proof.json"


class Record:
    """File that records which steps ran, how they ended and how long they took."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self.found: dict[str, dict[str, Any]] = (
            json.loads(path.read_text()) if path.is_file() else {}
        )

    def is_done(self, step: Step) -> bool:
        """Return whether the same command has succeeded before or its output exists."""
        if step.makes is not None:
            return step.makes.is_file()
        found = self.found.get(step.name, {})
        return found.get("done") is True and found.get("command") == list(step.command)

    def has_failed(self, step: Step) -> bool:
        """Return whether the step has failed or was ended in its last run."""
        return self.found.get(step.name, {}).get("status", 0) not in (0, TIME_IS_UP)

    def put(self, step: Step, status: int, seconds: float) -> None:
        """Record how a step ended."""
        with self._lock:
            self.found[step.name] = {
                "done": status == 0, "status": status, "seconds": round(seconds, 1),
                "command": list(step.command),
            }  # fmt: skip
            partial = self._path.with_suffix(".part")
            partial.write_text(json.dumps(self.found, indent=1) + "\n")
            partial.replace(self._path)


class Running:
    """Runs the steps of a call until ``deadline`` (``time.monotonic``).

    ``keep``: called whenever steps have ended, since a killed call can save nothing.
    """

    def __init__(
        self, out: Path, record: Record, deadline: float, keep: Callable[[], None]
    ) -> None:
        self._out, self._record, self._deadline, self._keep = out, record, deadline, keep
        self._processes: set[subprocess.Popen[str]] = set()
        self.failed: list[str] = []
        self.later: list[str] = []

    def run(self, todo: Sequence[Step]) -> None:
        """Run in order the steps that fit the time left; sets ``failed`` and ``later``."""
        number, begun = 0, False
        try:
            for beside in _groups(todo):
                left = self._deadline - time.monotonic()
                # a call that has just begun takes any step, even one that is longer than a call
                fits = [
                    step for step in beside if step.has_data and (step.begins(left) or not begun)
                ]
                self.later += [step.name for step in beside if step not in fits]
                if fits:
                    self._say(fits, number, todo)
                    self._beside(fits, left)
                    self._keep()
                    begun = True
                number += len(beside)
        finally:
            for process in list(self._processes):
                end(process)

    def _say(self, steps: Sequence[Step], number: int, todo: Sequence[Step]) -> None:
        minutes = sum(max(step.minutes for step in beside) for beside in _groups(todo[number:]))
        names = ", ".join(step.name for step in steps)
        most = max(step.minutes for step in steps)
        print(f"[{number + 1}/{len(todo)}] {names} (~{most:g} of ~{minutes:.0f} min left): "
              f"{steps[0].shows}", flush=True)  # fmt: skip

    def _beside(self, steps: Sequence[Step], left: float) -> None:
        """Run ``steps`` in parallel and wait for all."""
        with ThreadPoolExecutor(len(steps)) as pool:
            try:
                list(pool.map(lambda step: self._one(step, left), steps))
            except BaseException:  # on a signal, end running steps before the pool waits for them
                for process in list(self._processes):
                    end(process)
                raise

    def _one(self, step: Step, left: float) -> None:
        began = time.monotonic()
        log = self._out / f"{step.name}.log"
        status, shown = self._command(step, log, step.most(left))
        seconds = time.monotonic() - began
        self._record.put(step, status, seconds)
        if status == TIME_IS_UP:
            self.later.append(step.name)
            shown = [*shown, f"    {step.name} goes on in the next call ({seconds:.0f} s)\n"]
        elif status:
            self.failed.append(step.name)
            shown = [*shown, f"    {step.name} failed with status {status}: {log}\n"]
        else:
            shown = [*shown, f"    {step.name}: done in {seconds:.0f} s\n"]
        sys.stdout.write("".join(shown))
        sys.stdout.flush()

    def _command(self, step: Step, log: Path, left: float) -> tuple[int, list[str]]:
        """Run and log a step for at most ``left`` seconds; return its status and lines to show."""
        last, marked = deque[str](maxlen=TAIL), deque[str](maxlen=TAIL)
        words = step.words(left)
        with log.open("a") as kept:  # all calls append to the log of a resumed step
            kept.write(f"$ {shlex.join(words)}\n")
            process = subprocess.Popen(
                words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, errors="replace", preexec_fn=os.setpgrp,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **step.env},
            )  # fmt: skip
            self._processes.add(process)
            assert process.stdout is not None
            alarm = threading.Timer(min(left, threading.TIMEOUT_MAX), end, (process, step.name))
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
                end(process)
                self._processes.discard(process)
        return status, [f"    {line}" for line in (last if status else marked)]


def _groups(todo: Sequence[Step]) -> Iterator[list[Step]]:
    """Yield groups of parallel steps; every other step is a group of one."""
    for beside, steps in groupby(todo, lambda step: step.beside):
        found = list(steps)
        yield from [found] if beside else ([step] for step in found)


def end(process: subprocess.Popen[str], late: str = "") -> None:
    """End the process and its children unless it has ended; ``late``: step whose time is up."""
    if late:
        print(f"    {late} still runs, and its time is over", flush=True)
        process.send_signal(signal.SIGINT)  # pytest prints its results so far
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(FAREWELL_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def deadline_of(minutes: float) -> float:
    """Return the end of a call that begins now, in ``time.monotonic``."""
    return math.inf if math.isinf(minutes) else time.monotonic() + 60 * minutes
