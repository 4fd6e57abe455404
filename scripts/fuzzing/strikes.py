"""Strike a training, and check that it ends as docs/faults.md says."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from fuzzing.checkpoints import FILE, flip_record
from fuzzing.jobs import Job

#: seconds: process group timeout of jobs that this timeout must end; time that a launcher then
#: gives a stopped rank
TIMEOUT = 10
LAUNCHER_S = 30
#: seconds for imports and start-up on a busy machine; also the process group timeout of all other
#: jobs, which only the strike may end
START_S = 600


@dataclass
class Strike:
    """One run: the strike and its required outcome."""

    kind: str
    settings: dict[str, Any]
    rank: int = 0
    step: int = 0
    says: list[str] = field(default_factory=list)  # patterns that the output must contain
    finishes: bool = False
    prepare: Callable[[Path], None] = lambda folder: None
    act: Callable[[Job, int], None] | None = None  # at ``step``; None: ``prepare`` strikes


@dataclass
class Outcome:
    """End of a run; ``problems`` is empty if it ended as required."""

    strike: Strike
    seconds: float
    problems: list[str]
    text: str


def make(seed: int, checkpoint: Path) -> Strike:
    """Define the run of ``seed``. ``checkpoint``: folder of a job that saved and ended normally."""
    choose = random.Random(seed)
    kind = choose.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
    return KINDS[kind][1](choose, checkpoint)


def _settings(choose: random.Random, **more: Any) -> dict[str, Any]:
    return {
        "ranks": choose.choice([2, 2, 2, 3]), "stage": choose.choice([1, 2, 3]),
        "timeout": START_S, "pause": 0.05, "save_every": 3, "steps": 8, **more,
    }  # fmt: skip


def _named(rank: int) -> str:
    return rf"rank {rank} \(process \d+ on [^)]+\)"


def _kill(choose: random.Random, _: Path) -> Strike:
    settings = _settings(choose)
    rank = choose.randrange(settings["ranks"])
    says = [_named(rank) + " has ended"]
    return Strike("kill", settings, rank, choose.randrange(7), says, act=_send(signal.SIGKILL))


def _stop(choose: random.Random, _: Path) -> Strike:
    settings = _settings(choose, timeout=TIMEOUT)
    rank = choose.randrange(settings["ranks"])
    says = [_named(rank) + r" is stopped"]
    return Strike("stop", settings, rank, choose.randrange(7), says, act=_send(signal.SIGSTOP))


def _pause(choose: random.Random, _: Path) -> Strike:
    """Pause a rank for less than the timeout: nothing may be lost."""
    settings = _settings(choose)
    rank, seconds = choose.randrange(settings["ranks"]), choose.uniform(0.1, 2.0)

    def act(job: Job, rank: int) -> None:
        _send(signal.SIGSTOP)(job, rank)
        time.sleep(seconds)
        _send(signal.SIGCONT)(job, rank)

    return Strike("pause", settings, rank, choose.randrange(7), finishes=True, act=act)


def _restart(choose: random.Random, _: Path) -> Strike:
    """Kill under a launcher that restarts all ranks: they resume from the last checkpoint."""
    settings = _settings(choose, restarts=1, save_every=2)
    rank, step = choose.randrange(settings["ranks"]), choose.randrange(3, 7)
    says = [r"goes on from step [246]"]
    return Strike("restart", settings, rank, step, says, finishes=True, act=_send(signal.SIGKILL))


def _block(choose: random.Random, _: Path) -> Strike:
    settings = _settings(choose)
    rank = choose.randrange(settings["ranks"])
    bits = {"codec": "blockint", "bits": choose.choice([2, 3, 5, 8]), "error_feedback": True}
    settings["block"] = {str(rank): {"dp": bits}}
    says = [r"compression block: rank\(s\) [\d, ]+ differ from rank 0 .*compression\.dp"]
    return Strike("block", settings, rank, says=says)


def _version(choose: random.Random, _: Path) -> Strike:
    settings = _settings(choose)
    rank = choose.randrange(settings["ranks"])
    settings["version"] = {str(rank): "9.9.9"}
    says = [r"rank\(s\) [\d, ]+ differ from rank 0 \(hybridcomp: .*9\.9\.9"]
    return Strike("version", settings, rank, says=says)


def _flip(choose: random.Random, checkpoint: Path) -> Strike:
    settings = _settings(choose, ranks=2, stage=2)
    rank = choose.randrange(2)
    name = FILE.format(rank)

    def prepare(folder: Path) -> None:
        shutil.copytree(checkpoint, folder / "checkpoints")
        tag = (folder / "checkpoints" / "latest").read_text().strip()
        flip_record(folder / "checkpoints" / tag / name, choose)

    says = [rf"rank {rank}: \S*{re.escape(name)} is damaged"]
    return Strike("flip", settings, rank, says=says, prepare=prepare)


def _full_checkpoint(choose: random.Random, _: Path) -> Strike:
    settings = _settings(choose)
    rank = choose.randrange(settings["ranks"])
    settings["room"] = {str(rank): choose.randrange(2_000, 15_000)}
    says = [rf"rank {rank}: \S*{re.escape(FILE.format(rank))} cannot be written"]
    return Strike("full checkpoint", settings, rank, says=says)


def _full_ledger(choose: random.Random, _: Path) -> Strike:
    settings = _settings(choose, save_every=0)
    settings["room"] = {"0": choose.randrange(100, 1500)}
    says = [r"ledger\.jsonl: a record cannot be written .* the run goes on"]
    return Strike("full ledger", settings, says=says, finishes=True)


KINDS: Mapping[str, tuple[int, Callable[[random.Random, Path], Strike]]] = {
    "kill": (30, _kill), "stop": (20, _stop), "pause": (10, _pause), "restart": (8, _restart),
    "block": (6, _block), "version": (4, _version), "flip": (8, _flip),
    "full checkpoint": (8, _full_checkpoint), "full ledger": (6, _full_ledger),
}  # fmt: skip


def _send(number: signal.Signals) -> Callable[[Job, int], None]:
    def act(job: Job, rank: int) -> None:
        pid = job.rank_pid(rank)
        if pid is None:  # it ended before; its end decides
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    return act


def run(
    strike: Strike, folder: Path, launcher: str = "agent", context: ForkServerContext | None = None
) -> Outcome:
    """Start the job, strike, and compare its end with the required one."""
    folder.mkdir(parents=True, exist_ok=True)
    strike.prepare(folder)
    began = time.monotonic()
    job = Job(folder, strike.settings, launcher, context)
    try:
        problems = _strike(strike, job)
        limit = START_S + (LAUNCHER_S + TIMEOUT if strike.kind == "stop" else 0)
        if not job.wait(limit):
            problems.append(f"hung: did not end within {limit} s")
        if left := job.left_after(LAUNCHER_S):
            problems.append(f"left processes {left}")
    finally:
        job.end()
    problems += _wrong(strike, job)
    return Outcome(strike, time.monotonic() - began, problems, job.text)


def _strike(strike: Strike, job: Job) -> list[str]:
    """Strike when the rank reaches the strike's step; return why it did not reach it."""
    if strike.act is None:
        return []
    deadline = time.monotonic() + START_S
    while job.step(strike.rank) < strike.step:
        if job.has_ended():
            return ["ended before anything was done to it"]
        if time.monotonic() > deadline:
            return [f"rank {strike.rank} never came to step {strike.step}"]
        time.sleep(0.01)
    time.sleep(random.Random(str(job.folder)).uniform(0, 0.06))
    strike.act(job, strike.rank)
    return []


def _wrong(strike: Strike, job: Job) -> list[str]:
    """List problems at the end of a job."""
    text, ranks = job.text, strike.settings["ranks"]
    problems = [f"nothing says {pattern!r}" for pattern in strike.says if not _says(pattern, text)]
    finished = len(re.findall(r"FINISHED rank \d+ step 8 ", text))
    if strike.finishes and (job.code != 0 or finished != ranks):
        problems.append(f"{finished} of {ranks} ranks finished, exit status {job.code}")
    if not strike.finishes and (job.code == 0 or finished):
        problems.append(f"{finished} ranks finished, exit status {job.code}")
    return problems


def _says(pattern: str, text: str) -> bool:
    return re.search(pattern, text) is not None
