"""Run trainings of a layout on one GPU, a few steps each in turn."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import one_gpu
from benchmarks.shared import say
from benchmarks.training_bench import forked
from benchmarks.training_bench.cells import LAYOUTS, REFERENCE, Arm
from benchmarks.training_bench.forked import Job, JobError
from benchmarks.training_bench.gpu_cells import COMPUTE, Options, specs_of
from benchmarks.training_bench.worker import sent_nbytes

#: arms that run their first steps at once, since loading libraries and kernels takes 2 core seconds
TOGETHER = 3


def server_of(layouts: Iterable[str], gpu: bool, folder: Path, timeout: float) -> ForkServerContext:
    """Start the fork server for the ranks of ``layouts``, with this process's environment.

    ``folder``: for DeepSpeed's builds unless the environment names one. Raises JobError.
    """
    os.environ.update(forked.environment(gpu))
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(folder / "extensions"))
    tensor_parallel = any("--tp" in LAYOUTS[layout].arguments for layout in layouts)
    return forked.server(timeout, tensor_parallel)


def slowest(answers: Sequence[Any]) -> list[float]:
    """Return the seconds of each step of a turn, taken from the slowest rank.

    ``answers``: each rank's reply, a word and its step times.
    """
    ranks = [steps for _, steps in answers]
    return [max(rank["seconds"] for rank in each) for each in zip(*ranks, strict=True)]


def measures(name: str) -> bool:
    """Return whether an arm benchmarks messages at its start and in its first steps."""
    return "auto" in name


@dataclass(frozen=True)
class Plan:
    """Numbers of steps and rounds, for all layouts."""

    warm: int  # uncounted steps of an arm's first turn
    settling: int  # instead of ``warm``, for arms that measure in their first steps
    timed: int  # counted steps of a turn, after an uncounted one
    rounds: int
    timeout: float  # seconds for a start or a turn


class Book:
    """Append-only JSON lines, each written at once; the file may hold records of earlier calls."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, record: dict[str, Any]) -> None:
        """Append a record."""
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def rounds(self, size: str, layout: str, arms: Sequence[str]) -> int:
        """Count the rounds in which all of these arms ran together, in this and earlier calls."""
        if not self._path.is_file():
            return 0
        records = (json.loads(text) for text in self._path.read_text().splitlines())
        mine = ("round", size, layout, list(arms))
        return sum(
            mine == tuple(record.get(name) for name in ("kind", "size", "layout", "arms"))
            for record in records
        )


@dataclass(frozen=True)
class Part:
    """Some arms of a layout that take turns; ``number`` identifies the part."""

    layout: str
    number: int
    arms: tuple[Arm, ...]
    first: int = 0  # first missing round

    @property
    def names(self) -> list[str]:
        """Return the names of its arms."""
        return [arm.name for arm in self.arms]


def run(sessions: Sequence[Session]) -> bool:
    """Start the ranks of all sessions together, then measure the sessions one after the other.

    Returns False if time ran out before a session's last round. Starting loads the CPU more than
    the GPU; while a session measures, the ranks of others are idle.
    """
    over = True
    try:
        for session in sessions:
            session.launch()
        for session in sessions:
            session.await_ranks()
        for session in sessions:
            over = session.measure() and over
            session.close()
    finally:
        for session in sessions:
            session.close()
    return over


class Session:
    """Runs a part: starts the arms, gives turns, records; ``deadline`` in ``time.monotonic``."""

    def __init__(
        self, context: ForkServerContext, options: Options, plan: Plan, book: Book,
        deadline: float, part: Part,
    ) -> None:  # fmt: skip
        self._context, self._options, self._plan = context, options, plan
        self._book, self._deadline, self._part = book, deadline, part
        self._head = {
            "size": options.size, "layout": part.layout, "part": part.number,
            "device": options.device, "session": f"{os.getpid()}.{time.time_ns()}",
        }  # fmt: skip
        self._jobs: dict[str, Job] = {}
        self._began = time.monotonic()
        # native's ranks also run the arm without a wire; arms that measure at start start alone
        arms = [arm for arm in part.arms if arm.name != COMPUTE]
        self._alone = [arm for arm in arms if measures(arm.name)]
        self._together = [arm for arm in arms if arm not in self._alone]

    def launch(self) -> None:
        """Launch at once the arms that measure nothing before their first step."""
        self._began = time.monotonic()
        for arm in self._together:
            self._begin(arm)

    def await_ranks(self) -> None:
        """Wait until the launched arms are ready for their first step."""
        for arm in self._together:
            self._await(arm)

    def measure(self) -> bool:
        """Start the other arms one by one, then run the rounds; return False if time ran out.

        A failing arm is recorded and skipped from then on.
        """
        layout, names = self._part.layout, self._part.names
        for arm in self._alone:
            self._begin(arm)
            self._await(arm)
        say(f"{layout}: {len(self._jobs)} started in {self._seconds()}")
        self._warm(names)
        say(f"{layout}: warm after {self._seconds()}")
        over = True
        for number in range(self._part.first, self._plan.rounds):
            if time.monotonic() > self._deadline:
                say(f"{layout}: time is up after {number} rounds")
                over = False
                break
            for name in names[:: 1 if number % 2 == 0 else -1]:
                self._turn(name, number, self._plan.timed + 1)
            self._book.add({"kind": "round", **self._head, "round": number, "arms": names})
        for name in list(self._jobs):
            self._end(name)
        say(f"{layout}: over after {self._seconds()}")
        return over

    def close(self) -> None:
        """End the remaining ranks."""
        for job in self._jobs.values():
            job.close()
        self._jobs.clear()

    def _seconds(self) -> str:
        return f"{time.monotonic() - self._began:.1f} s"

    def _begin(self, arm: Arm) -> None:
        plan = self._plan
        steps = plan.settling + (plan.timed + 1) * plan.rounds + 10**6
        specs = specs_of(self._part.layout, arm, steps, one_gpu.free_port(), self._options)
        self._jobs[arm.name] = Job.start(self._context, specs, plan.timeout)

    def _await(self, arm: Arm) -> None:
        with self._failing(arm.name):
            self._jobs[arm.name].answers()

    def _warm(self, names: list[str]) -> None:
        """Run first steps of ``TOGETHER`` arms at once; an arm that measures then runs alone."""
        names = [name for name in names if name in self._jobs]
        alone = [name for name in names if measures(name)]
        others = [name for name in names if name not in alone]
        groups = [others[i : i + TOGETHER] for i in range(0, len(others), TOGETHER)]
        for group in [*groups, *([name] for name in alone)]:
            steps = self._plan.settling if measures(group[0]) else self._plan.warm
            before = sent_nbytes("lo")
            for name in group:
                with self._failing(name):
                    self._jobs[name].tell("go", steps, False)
            for name in group:
                self._heard(name, -1, steps, before)

    def _turn(self, name: str, number: int, steps: int) -> None:
        """Run ``steps`` of an arm; record all times but the first, and the bytes sent on ``lo``."""
        owner = REFERENCE if name == COMPUTE else name
        before = sent_nbytes("lo")
        if owner in self._jobs:
            with self._failing(owner):
                self._jobs[owner].tell("go", steps, name == COMPUTE)
        self._heard(name, number, steps, before)

    def _heard(self, name: str, number: int, steps: int, before: int) -> None:
        """Wait for the end of a turn and record it; do nothing if the arm has failed."""
        owner, answers = REFERENCE if name == COMPUTE else name, []
        if owner in self._jobs:
            with self._failing(owner):
                answers = self._jobs[owner].answers()
        if not answers:
            return
        sent = (sent_nbytes("lo") - before) / steps
        seconds, last = slowest(answers), answers[0][1][-1]
        kept = seconds[1:] if number >= 0 else seconds
        self._book.add(
            {
                "kind": "turn", **self._head, "arm": name, "round": number,
                "seconds": [round(value, 6) for value in kept], "sent": round(sent),
                "loss": last["loss"], "samples": last["samples"],
            }
        )  # fmt: skip
        if number <= self._part.first:
            shown = " ".join(f"{value * 1e3:.0f}" for value in seconds)
            say(f"  {name}: {shown} ms, {sent / 1e6:.1f} MB, loss {last['loss']:.3f}")

    def _end(self, name: str) -> None:
        job = self._jobs[name]
        with self._failing(name):
            found = job.ask("end")[0][1]
            self._book.add(
                {
                    "kind": "end", **self._head, "arm": name, "ledger": found["ledger"],
                    "memory": found["memory"], "auto": job.said("when: auto"),
                }
            )  # fmt: skip

    @contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        """Record a JobError that the body raises, and end arm ``name``."""
        try:
            yield
        except JobError as error:
            say(f"  {name}: FAILED {error}")
            self._book.add({"kind": "failed", **self._head, "arm": name, "why": str(error)})
            self._jobs.pop(name).close()
