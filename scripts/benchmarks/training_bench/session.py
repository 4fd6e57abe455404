"""Trainings of one layout side by side on one network."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.training_bench.cells import Layout
from benchmarks.training_bench.runners import Runner, Steps, environment, steps_of
from benchmarks.training_bench.turns import VARIABLE, Job, door
from lab.team import Team


class Session:
    """Jobs that are started one after the other and then take turns; a context manager.

    Each starts, and measures what it measures before its first step, while the others wait.
    """

    def __init__(self, runner: Runner, layout: Layout, timeout: float) -> None:
        """``timeout``: seconds that a start or a step may take."""
        self._runner, self._layout, self._timeout = runner, layout, timeout
        self._stack = ExitStack()
        self._teams: dict[int, Team] = {}

    def __enter__(self) -> Session:
        self._folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        self._door, self._path = door(self._folder)
        self._stack.callback(self._door.close)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, command: list[str]) -> Job:
        """Start a job that waits for its first turn; one that failed before that is over."""
        own = Path(self._folder, f"job{len(self._teams)}")
        own.mkdir()
        env = {**environment(str(own)), VARIABLE: self._path}
        team = self._stack.enter_context(self._runner.started(command, self._layout, env))
        job = Job(self._door, team, self._layout.nodes * self._layout.per_node, self._timeout)
        self._stack.callback(job.close)
        self._teams[id(job)] = team
        return job

    def steps(self, job: Job) -> list[Steps]:
        """End a job whose last step was made, and return all steps of its ranks.

        Raises CellError where it failed, or had more steps to make.
        """
        team = self._teams[id(job)]
        job.step()
        team.wait(self._timeout if job.over else 0.0)
        team.end()
        found = steps_of(team.statuses, team.texts)
        if self._runner.counts:
            return found
        return [[{**step, "sent": 0.0} for step in steps] for steps in found]
