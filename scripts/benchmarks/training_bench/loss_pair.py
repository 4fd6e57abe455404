"""Trainings of one seed that begin together, from the fork of their ranks to what is kept."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.training_bench.forked import Job
from benchmarks.training_bench.gpu_losses import Case

#: steps by which a pair is timed, and the part of its steps that they are at most
TIMED, TIMED_PART = 30, 4


class Pair:
    """Ranks that wait at the same gates: before the first step, after some that are timed.

    The process that runs the study holds pairs; ``close`` ends the ranks that are left, whatever
    happened. Every call that hears or tells raises JobError where a rank has failed.
    """

    def __init__(self, jobs: dict[Case, Job], steps: int, last_gate: bool) -> None:
        """``steps``: of each. ``last_gate``: whether the trainings are over at their last step."""
        self.jobs, self.steps, self._last_gate = jobs, steps, last_gate
        self._forked, self.began = time.monotonic(), 0.0
        #: seconds until its ranks waited before their first step
        self.start_s = 0.0
        #: seconds of a step beside the other trainings, 0 before that is known
        self.step_s = 0.0
        #: steps that were let go; 0: the pair waits before its first one
        self.told = 0
        self._waiting: dict[Case, list[dict[str, float]]] = {}

    def __str__(self) -> str:
        return " and ".join(str(case) for case in self.jobs)

    @property
    def pipes(self) -> dict[int, Case]:
        """Return whose pipe it is, by its id."""
        return {id(pipe): case for case, job in self.jobs.items() for pipe in job.pipes}

    def connections(self) -> list[Connection]:
        """Return the pipes of all ranks that are left."""
        return [pipe for job in self.jobs.values() for pipe in job.pipes]

    @property
    def ready(self) -> bool:
        """Return whether every training that is left waits at the gate."""
        return bool(self.jobs) and len(self._waiting) == len(self.jobs)

    def hear(self, case: Case, patience: float) -> bool:
        """Hear all ranks of a training, at most ``patience`` seconds; return whether it is over."""
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
        """Take the seconds of a step from those of the slowest training, without the first ones."""
        steps = [said[len(said) // 3 :] for said in self._waiting.values() if said]
        if steps:
            self.step_s = max(statistics.median(one["seconds"] for one in said) for said in steps)

    def go_on(self) -> None:
        """Let all trainings go: first the steps that are timed, then all others."""
        first = max(1, min(TIMED, self.steps // TIMED_PART))
        more = self.steps - self.told if self.told else min(first, self.steps)
        if not self.told:
            self.began = time.monotonic()
        self.told += more
        self._waiting.clear()
        for job in self.jobs.values():
            job.tell("go", more, False)

    def close(self) -> None:
        """End all ranks that are left."""
        for job in self.jobs.values():
            job.close()
        self.jobs.clear()


def pair_of(
    context: Any, cases: Sequence[Case], specs: Sequence[Any], steps: int, timeout: float
) -> Pair:
    """Fork the ranks of ``cases``; ``specs``: those of each case."""
    jobs = {}
    try:
        for case, own in zip(cases, specs, strict=True):
            jobs[case] = Job.start(context, own, timeout)
    except BaseException:
        for job in jobs.values():
            job.close()
        raise
    return Pair(jobs, steps, cases[0].nccl)
