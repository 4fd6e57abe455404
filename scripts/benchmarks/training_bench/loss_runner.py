"""Run the pairs of a loss study one after the other, as many as fit the time."""

from __future__ import annotations

import argparse
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import wait
from typing import Any

from benchmarks.training_bench import gpu_losses, loss_cost, loss_pair, loss_records
from benchmarks.training_bench.forked import JobError
from benchmarks.training_bench.gpu_losses import Case, Method
from benchmarks.training_bench.loss_pair import Pair

#: seconds of the budget reserved for work after the last step
RESERVE_S = 8.0
#: minimum share of the requested steps that ``--fit`` accepts
FEWEST = 1 / 5
#: failing pairs after which no other starts
FAILURES = 2


class Runner:
    """Runs pairs, and prepares the ranks of the next pair meanwhile.

    Finished trainings are written at once. However a run ends, it ends its ranks; a later run
    repeats their trainings.
    """

    def __init__(
        self,
        asked: argparse.Namespace,
        method: Method,
        context: Any,
        turns: Iterable[Sequence[Case]],
        say: Callable[[str], None],
    ) -> None:
        """``asked``: budget, deadline, beside, fit, timeout, vocabulary, cpu and folders."""
        self.asked, self.method, self._context, self._say = asked, method, context, say
        self.turns = deque(tuple(turn) for turn in turns)
        self.active: list[Pair] = []
        self.failed, self.time_is_up = 0, False
        #: latest seconds per step and per start; equivalent steps of a whole pair
        self.step_s, self.start_s, self.lasted = 0.0, 0.0, 0.0

    def run(self) -> None:
        """Run the missing pairs; then ``failed`` and ``time_is_up`` describe the rest."""
        try:
            while self.turns or self.active:
                self._begin()
                if not self.active:
                    return
                if self.left <= 0:
                    self._stop(f"time is up: {', '.join(map(str, self.active))} ended")
                    return
                for pair, case in self._heard():
                    if pair in self.active:
                        self._hear(pair, case)
                self._go_on()
        finally:
            for pair in self.active:
                pair.close()

    @property
    def left(self) -> float:
        """Return the remaining seconds of the budget."""
        return float(self.asked.deadline) - time.monotonic()

    def need(self) -> float:
        """Return the estimated seconds of a pair from its first step, 0 while unknown."""
        step = self.step_s
        if not step and not self.asked.cpu:
            at_once = 2 * self.asked.beside
            step = loss_cost.step_seconds(
                self.method, self.asked.vocabulary, at_once, loss_cost.SHARE[0]
            )
        return step * self._equal_steps()

    def _equal_steps(self) -> float:
        """Return the steps that take as long as a pair with its evaluations, as measured last."""
        return self.lasted or loss_cost.equal_steps(self.method)

    def _begin(self) -> None:
        """Fork the next pairs: as many as may run, plus one that waits."""
        while self.turns:
            going = [pair for pair in self.active if pair.told]
            waits = len(self.active) > len(going)
            place = len(self.active) < self.asked.beside
            if not place and (waits or not all(pair.step_s for pair in going)):
                return
            start = self.start_s or (0.0 if self.asked.cpu else loss_cost.START_S)
            until = 0.0 if place else min(self._rest(pair) for pair in going)
            need = max(start, until) + self.need() + RESERVE_S
            turn = self.turns[0]
            if need > self.left and (self.active or not self.asked.fit):
                if not self.active:  # otherwise decide when the running pairs end
                    names = " and ".join(map(str, turn))
                    self._later(f"{names} would need {need:.0f} s")
                return
            self.turns.popleft()
            specs = [gpu_losses.specs_of(case, self.method, self.asked) for case in turn]
            steps = self.asked.nccl_steps if turn[0].nccl else self.method.steps
            timeout = min(self.asked.timeout, max(1.0, self.left))
            self.active.append(loss_pair.pair_of(self._context, turn, specs, steps, timeout))

    def _rest(self, pair: Pair) -> float:
        """Return the estimated seconds that a pair still needs."""
        return max(0.0, pair.step_s * self._equal_steps() - (time.monotonic() - pair.began))

    def _heard(self) -> list[tuple[Pair, Case]]:
        """Return the trainings whose ranks sent something within some seconds."""
        whose = {key: (pair, case) for pair in self.active for key, case in pair.pipes.items()}
        pipes = [pipe for pair in self.active for pipe in pair.connections()]
        ready = wait(pipes, max(0.0, min(self.left, 5.0)))
        return list(dict.fromkeys(whose[id(pipe)] for pipe in ready))

    def _hear(self, pair: Pair, case: Case) -> None:
        """Receive from a training; store its record if it has ended."""
        try:
            if pair.hear(case, min(self.asked.timeout, max(1.0, self.left))):
                self._keep(pair, case)
        except (JobError, ValueError) as error:
            self._fail(pair, f"{case}: {error}")

    def _go_on(self) -> None:
        """Release pairs whose trainings all wait, if they hold or get a place."""
        for pair in list(self.active):
            going = sum(bool(other.told) for other in self.active)
            if pair in self.active and pair.ready and (pair.told or going < self.asked.beside):
                try:
                    self._go(pair)
                except JobError as error:
                    self._fail(pair, str(error))

    def _keep(self, pair: Pair, case: Case) -> None:
        seconds = {"start": pair.start_s, "pair": time.monotonic() - pair.began}
        record = loss_records.write(self.asked.out, self.asked.logs, case, self.method, seconds)
        shutil.rmtree(case.folder(self.asked.logs))  # the record has everything needed
        last = record["log"][-1]
        end = f", valid {last['valid_loss']:.4f}" if last.get("summary") else ""
        self._say(f"{case} is over after {seconds['pair']:.1f} s{end}")
        if not pair.jobs:
            self.active.remove(pair)
            if pair.step_s and not case.nccl:
                self.lasted = seconds["pair"] / pair.step_s

    def _go(self, pair: Pair) -> None:
        """Release a pair unless its first steps show that it cannot end in time."""
        if not pair.told:
            self.start_s = pair.start_s
            self._say(f"{pair} begin")
        elif not pair.step_s:
            pair.time()
            if pair.step_s and not next(iter(pair.jobs)).nccl:
                self.step_s = pair.step_s
                if self._too_slow(pair):
                    return
        pair.go_on()

    def _too_slow(self, pair: Pair) -> bool:
        """End a pair that cannot end in time, to start again shorter or in a later run."""
        fit, self.asked.fit = self.asked.fit, 0
        wanted = max(1, min(fit, 1 + len(self.turns)))
        whole = self._equal_steps() * pair.step_s
        spent = time.monotonic() - pair.began
        if wanted * whole - spent + RESERVE_S <= self.left:
            return False
        told = f"{pair}: {pair.step_s * 1e3:.0f} ms a step"
        for pairs in range(wanted, 0, -1) if fit else ():
            room = self.left - self.start_s - RESERVE_S
            reading = self._equal_steps() - self.method.steps
            fitting = self.method.shorter(room / (pairs * pair.step_s) - reading)
            if fitting.steps >= FEWEST * self.method.steps:
                self._say(f"{told}; {fitting.steps} steps for {self.method.steps}, so that "
                    f"{pairs} pairs end in the {self.left:.0f} s that are left")  # fmt: skip
                self.method = fitting
                self._again()
                return True
        if whole - spent + RESERVE_S <= self.left:
            return False
        self._again()
        self._later(f"{told}: a pair takes {whole:.0f} s")
        return True

    def _again(self) -> None:
        """End all pairs and put them back to the front of the queue."""
        for pair in reversed(self.active):
            self.turns.appendleft(tuple(pair.jobs))
            pair.close()
        self.active.clear()

    def _later(self, why: str) -> None:
        """Leave the queue to a later run."""
        cases = sum(len(turn) for turn in self.turns)
        self._say(f"{why}, {self.left:.0f} s are left: {cases} trainings are for a later call")
        self.turns.clear()
        self.time_is_up = True

    def _stop(self, why: str) -> None:
        self._say(f"{why}, {sum(len(turn) for turn in self.turns)} trainings never began")
        self.turns.clear()
        self.time_is_up = True

    def _fail(self, pair: Pair, why: str) -> None:
        """End the other trainings of a failed pair: a gap needs both."""
        if self.left <= 1:
            return  # it ran out of time, which the loop reports
        self._say(f"{pair} FAILED: {why}")
        self.failed += 1
        pair.close()
        self.active.remove(pair)
        if self.failed >= FAILURES and self.turns:
            self._say(f"{self.failed} pairs failed: no other one begins")
            self.turns.clear()
