"""Run the trainings of a seed that start together, from forking their ranks to their records."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.training_bench.forked import Job
from benchmarks.training_bench.gpu_losses import Case

#: steps that time a pair, and their maximum share of its steps
TIMED, TIMED_PART = 30, 4


class Pair:
    """Trainings that wait at common gates: before the first step and after some timed steps.

    The study's process owns pairs; ``close`` ends the remaining ranks in any case. Methods that
    communicate raise JobError if a rank has failed.
    """

    def __init__(self, jobs: dict[Case, Job], steps: int, last_gate: bool) -> None:
        """``steps``: per training. ``last_gate``: whether the trainings end at their last step."""
        self.jobs, self.steps, self._last_gate = jobs, steps, last_gate
        self._forked, self.began = time.monotonic(), 0.0
        #: seconds until its ranks were ready for their first step
        self.start_s = 0.0
        #: seconds per step beside the other trainings, 0 while unknown
        self.step_s = 0.0
        #: steps released so far; 0: waiting before the first
        self.told = 0
        self._waiting: dict[Case, list[dict[str, float]]] = {}

    def __str__(self) -> str:
        return " and ".join(str(case) for case in self.jobs)

    @property
    def pipes(self) -> dict[int, Case]:
        """Return the training of each pipe, by the pipe's id."""
        return {id(pipe): case for case, job in self.jobs.items() for pipe in job.pipes}

    def connections(self) -> list[Connection]:
        """Return the pipes of all remaining ranks."""
        return [pipe for job in self.jobs.values() for pipe in job.pipes]

    @property
    def ready(self) -> bool:
        """Return whether all remaining trainings wait at the gate."""
        return bool(self.jobs) and len(self._waiting) == len(self.jobs)

    def hear(self, case: Case, patience: float) -> bool:
        """Receive from a training's ranks for up to ``patience`` seconds; return if it ended."""
        job = self.jobs[case]
        job.timeout = patience
        words: list[Any] = job.answers()
        if words[0][0] == "steps":
            self._waiting[case] = words[0][1]
            if self.ready and not self.told:
                self.start_s = time.monotonic() - self._forked
            over = self._last_gate and self.told >= self.steps
        else:
            over = True
        if over:
            self._waiting.pop(case, None)
            self.jobs.pop(case).close()
        return over

    def time(self) -> None:
        """Set the seconds per step from the slowest training, without its first steps."""
        steps = [said[len(said) // 3 :] for said in self._waiting.values() if said]
        if steps:
            self.step_s = max(statistics.median(one["seconds"] for one in said) for said in steps)

    def go_on(self) -> None:
        """Release all trainings: first for the timed steps, then for all others."""
        first = max(1, min(TIMED, self.steps // TIMED_PART))
        more = self.steps - self.told if self.told else min(first, self.steps)
        if not self.told:
            self.began = time.monotonic()
        self.told += more
        self._waiting.clear()
        for job in self.jobs.values():
            job.tell("go", more, False)

    def close(self) -> None:
        """End the remaining ranks."""
        for job in self.jobs.values():
            job.close()
        self.jobs.clear()


def pair_of(
    context: Any, cases: Sequence[Case], specs: Sequence[Any], steps: int, timeout: float
) -> Pair:
    """Fork the ranks of ``cases``; ``specs``: per case."""
    jobs = {}
    try:
        for case, own in zip(cases, specs, strict=True):
            jobs[case] = Job.start(context, own, timeout)
    except BaseException:
        for job in jobs.values():
            job.close()
        raise
    return Pair(jobs, steps, cases[0].nccl)
