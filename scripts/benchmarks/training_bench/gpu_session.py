"""Trainings of one layout side by side on one GPU, a few steps each in turn."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import one_gpu
from benchmarks.training_bench import forked
from benchmarks.training_bench.cells import LAYOUTS, REFERENCE, Arm
from benchmarks.training_bench.forked import Job, JobError
from benchmarks.training_bench.gpu_cells import COMPUTE, Options, specs_of
from benchmarks.training_bench.worker import sent_nbytes

#: arms that take their first steps at once: loading libraries and kernels takes 2 s of a core
TOGETHER = 3


def server_of(
    layouts: Iterable[str], gpu: bool, folder: Path, timeout: float, say: Callable[[str], None]
) -> ForkServerContext:
    """Start the fork server of the ranks of ``layouts``, with this process's environment.

    ``folder``: of what DeepSpeed builds, unless the environment names one. Raises JobError.
    """
    os.environ.update(forked.environment(gpu))
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(folder / "extensions"))
    tensor_parallel = any("--tp" in LAYOUTS[layout].arguments for layout in layouts)
    return forked.server(timeout, say, tensor_parallel)


def slowest(answers: Sequence[Any]) -> list[float]:
    """Return the seconds of each step of a turn, of the rank that took longest.

    ``answers``: of all ranks, a word and their steps.
    """
    ranks = [steps for _, steps in answers]
    return [max(rank["seconds"] for rank in each) for each in zip(*ranks, strict=True)]


def measures(name: str) -> bool:
    """Return whether an arm times messages when it starts and in its first steps."""
    return "auto" in name


@dataclass(frozen=True)
class Plan:
    """Number of steps and rounds of every layout."""

    warm: int  # steps of an arm's first turn, which are not counted
    settling: int  # the same of arms that measure during their first steps
    timed: int  # steps of a turn that are, after one that is not
    rounds: int
    timeout: float  # seconds of a start or a turn


class Book:
    """Records as JSON lines, each written at once; a file may hold those of earlier calls."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, record: dict[str, Any]) -> None:
        """Append a record."""
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def rounds(self, size: str, layout: str, arms: Sequence[str]) -> int:
        """Count the rounds that these arms have had side by side, in this call or before."""
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
    """Arms of one layout that take turns: the ``number``-th part of its arms."""

    layout: str
    number: int
    arms: tuple[Arm, ...]
    first: int = 0  # the first round that is missing

    @property
    def names(self) -> list[str]:
        """Return the names of its arms."""
        return [arm.name for arm in self.arms]


def run(sessions: Sequence[Session]) -> bool:
    """Measure one session after the other, whose ranks are started together.

    Returns False where time was up before the last round of one. What starts costs the processor
    more than the GPU; while one session measures nothing of the others runs.
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
    """One part: starts the arms, gives turns, writes what it sees. ``deadline``: of ``time``."""

    def __init__(
        self, context: ForkServerContext, options: Options, plan: Plan, book: Book,
        say: Callable[[str], None], deadline: float, part: Part,
    ) -> None:  # fmt: skip
        self._context, self._options, self._plan = context, options, plan
        self._book, self._say, self._deadline = book, say, deadline
        self._part = part
        self._head = {
            "size": options.size, "layout": part.layout, "part": part.number,
            "device": options.device,
        }  # fmt: skip
        self._jobs: dict[str, Job] = {}
        self._began = time.monotonic()
        # native's ranks do what is without a wire; what measures as it starts is started alone
        arms = [arm for arm in part.arms if arm.name != COMPUTE]
        self._alone = [arm for arm in arms if measures(arm.name)]
        self._together = [arm for arm in arms if arm not in self._alone]

    def launch(self) -> None:
        """Start the arms at once that measure nothing before their first step."""
        self._began = time.monotonic()
        for arm in self._together:
            self._begin(arm)

    def await_ranks(self) -> None:
        """Return when the arms that were launched could make their first step."""
        for arm in self._together:
            self._await(arm)

    def measure(self) -> bool:
        """Start the other arms, one by one, then run the rounds; False: time was up before.

        What fails is written down and left out from then on.
        """
        layout, names = self._part.layout, self._part.names
        for arm in self._alone:
            self._begin(arm)
            self._await(arm)
        self._say(f"{layout}: {len(self._jobs)} started in {self._seconds()}")
        self._warm(names)
        self._say(f"{layout}: warm after {self._seconds()}")
        over = True
        for number in range(self._part.first, self._plan.rounds):
            if time.monotonic() > self._deadline:
                self._say(f"{layout}: time is up after {number} rounds")
                over = False
                break
            for name in names[:: 1 if number % 2 == 0 else -1]:
                self._turn(name, number, self._plan.timed + 1)
            self._book.add({"kind": "round", **self._head, "round": number, "arms": names})
        for name in list(self._jobs):
            self._end(name)
        self._say(f"{layout}: over after {self._seconds()}")
        return over

    def close(self) -> None:
        """End the ranks that are left."""
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
        try:
            self._jobs[arm.name].answers()
        except JobError as error:
            self._failed(arm.name, self._jobs[arm.name], error)

    def _warm(self, names: list[str]) -> None:
        """Run the first steps, ``TOGETHER`` arms at once; an arm that measures then runs alone."""
        names = [name for name in names if name in self._jobs]
        alone = [name for name in names if measures(name)]
        others = [name for name in names if name not in alone]
        groups = [others[i : i + TOGETHER] for i in range(0, len(others), TOGETHER)]
        for group in [*groups, *([name] for name in alone)]:
            steps = self._plan.settling if measures(group[0]) else self._plan.warm
            before, told = sent_nbytes("lo"), []
            for name in group:
                try:
                    self._jobs[name].tell("go", steps, False)
                    told.append(name)
                except JobError as error:
                    self._failed(name, self._jobs[name], error)
            for name in told:
                self._heard(name, -1, steps, before)

    def _turn(self, name: str, number: int, steps: int) -> None:
        """``steps`` of one arm, of which the first is not kept; bytes are the interface's."""
        owner = REFERENCE if name == COMPUTE else name
        if owner not in self._jobs:
            return
        before = sent_nbytes("lo")
        try:
            self._jobs[owner].tell("go", steps, name == COMPUTE)
        except JobError as error:
            self._failed(owner, self._jobs[owner], error)
            return
        self._heard(name, number, steps, before)

    def _heard(self, name: str, number: int, steps: int, before: int) -> None:
        """Wait for the end of a turn and write it down."""
        owner = REFERENCE if name == COMPUTE else name
        try:
            answers = self._jobs[owner].answers()
        except JobError as error:
            self._failed(owner, self._jobs[owner], error)
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
            self._say(f"  {name}: {shown} ms, {sent / 1e6:.1f} MB, loss {last['loss']:.3f}")

    def _end(self, name: str) -> None:
        job = self._jobs[name]
        try:
            answers = job.ask("end")
        except JobError as error:
            self._failed(name, job, error)
            return
        found = answers[0][1]
        self._book.add(
            {
                "kind": "end", **self._head, "arm": name, "ledger": found["ledger"],
                "memory": found["memory"], "auto": job.said("when: auto"),
            }
        )  # fmt: skip

    def _failed(self, name: str, job: Job, error: JobError) -> None:
        self._say(f"  {name}: FAILED {error}")
        self._book.add({"kind": "failed", **self._head, "arm": name, "why": str(error)})
        self._jobs.pop(name, None)
        job.close()
