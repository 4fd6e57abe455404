"""Run the pairs of a loss study one after the other, as many as fit the time."""

from __future__ import annotations

import argparse
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.training_bench import gpu_losses, loss_records
from benchmarks.training_bench.forked import Job, JobError
from benchmarks.training_bench.gpu_losses import Case, Method

#: seconds of the budget reserved for work after the last step
RESERVE_S = 8.0
#: failing pairs after which no other starts
FAILURES = 2


class Pair:
    """The trainings of a seed, forked at once; ``close`` ends their ranks in any case."""

    def __init__(self, context: Any, cases: Sequence[Case], method: Method, asked: Any) -> None:
        """``asked``: deadline, timeout, cpu, data and folders."""
        self.cases, self._method, self._asked = tuple(cases), method, asked
        self._forked, self.jobs = time.monotonic(), dict[Case, Job]()
        try:
            for case in cases:
                specs = gpu_losses.specs_of(case, method, asked)
                self.jobs[case] = Job.start(context, specs, self._patience())
        except BaseException:
            self.close()
            raise

    def __str__(self) -> str:
        return " and ".join(map(str, self.cases))

    def _patience(self) -> float:
        """Return the seconds that a rank may say nothing."""
        left = float(self._asked.deadline) - time.monotonic()
        return max(1.0, min(float(self._asked.timeout), left))

    def begin(self) -> None:
        """Wait until all ranks are ready for their first step, and release them for all steps.

        Raises JobError, as ``end``.
        """
        for job in self.jobs.values():
            job.answers()
        self.begun = time.monotonic()
        for job in self.jobs.values():
            job.tell("go", self._method.steps, False)

    def end(self) -> None:
        """Wait until the deadline for the trainings to end, and write their records.

        Raises also ValueError for an incomplete log.
        """
        for case, job in self.jobs.items():
            job.timeout = self._patience()
            job.answers()
            seconds = {
                "start": self.begun - self._forked, "pair": time.monotonic() - self.begun,
            }  # fmt: skip
            logs = self._asked.logs
            loss_records.write(self._asked.out, logs, case, self._method, seconds)
            shutil.rmtree(case.folder(logs))  # the record has everything needed

    def close(self) -> None:
        """End the remaining ranks."""
        for job in self.jobs.values():
            job.close()


class Runner:
    """Runs pairs; the ranks of the next one start while a pair trains.

    However a run ends, it ends its ranks; a later run repeats their trainings.
    """

    def __init__(
        self,
        asked: argparse.Namespace,
        method: Method,
        context: Any,
        turns: Iterable[Sequence[Case]],
        say: Callable[[str], None],
        lasted: float = 0.0,
    ) -> None:
        """``asked``: as a ``Pair`` takes it; ``lasted``: seconds of an earlier pair, 0: unknown."""
        self._asked, self._method, self._context, self._say = asked, method, context, say
        self._turns = deque(tuple(turn) for turn in turns)
        self._coming: Pair | None = None
        self._lasted = lasted
        self.failed, self.time_is_up = 0, False

    def run(self) -> None:
        """Run the missing pairs; then ``failed`` and ``time_is_up`` describe the rest."""
        try:
            while self._coming is not None or self._turns:
                if not self._fits(1):
                    left = sum(map(len, self._turns)) + len(getattr(self._coming, "cases", ()))
                    self._say(f"{self._left:.0f} s are left: {left} trainings are for a later call")
                    self.time_is_up = True
                    return
                pair = self._coming or self._started()
                self._coming = None
                try:
                    self._train(pair)
                finally:
                    pair.close()
                if self.failed >= FAILURES:
                    self._say(f"{self.failed} pairs failed: no other one begins")
                    return
        finally:
            if self._coming is not None:
                self._coming.close()

    @property
    def _left(self) -> float:
        return float(self._asked.deadline) - time.monotonic()

    def _fits(self, pairs: int) -> bool:
        """Return whether ``pairs`` as long as the last one end in time."""
        return self._left > pairs * self._lasted + RESERVE_S

    def _started(self) -> Pair:
        return Pair(self._context, self._turns.popleft(), self._method, self._asked)

    def _train(self, pair: Pair) -> None:
        try:
            pair.begin()
            self._say(f"{pair} begin")
            if self._turns and self._fits(2):
                self._coming = self._started()
            pair.end()
        except (JobError, ValueError) as error:
            if self._left <= 1:
                self._say(f"time is up: {pair} ended")
                self.time_is_up = True
                return
            self._say(f"{pair} FAILED: {error}")
            self.failed += 1
            return
        self._lasted = time.monotonic() - pair.begun
        self._say(
            f"{pair} {'are' if len(pair.cases) > 1 else 'is'} over after {self._lasted:.1f} s"
        )
