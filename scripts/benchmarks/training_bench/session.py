"""Run trainings of one layout together on one network."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.training_bench.cells import Layout
from benchmarks.training_bench.runners import Runner, Steps, check, environment
from benchmarks.training_bench.turns import VARIABLE, Job, door
from lab.team import Team


class Session:
    """Context manager of jobs that start one after the other and then take turns.

    While a job starts and benchmarks messages, the others wait.
    """

    def __init__(self, runner: Runner, layout: Layout, timeout: float) -> None:
        """``timeout``: seconds for a start or a step."""
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
        """Start a job, which waits for its first turn; ``over`` if it fails before that."""
        own = Path(self._folder, f"job{len(self._teams)}")
        own.mkdir()
        env = {**environment(str(own)), VARIABLE: self._path}
        team = self._stack.enter_context(self._runner.started(command, self._layout, env))
        job = Job(self._door, team, self._layout.nodes * self._layout.per_node, self._timeout)
        self._stack.callback(job.close)
        self._teams[id(job)] = team
        return job

    def steps(self, job: Job) -> list[Steps]:
        """End a finished job, and return all steps of its ranks.

        Raises CellError if the job failed or had steps left.
        """
        team = self._teams[id(job)]
        job.step()
        team.wait(self._timeout if job.over else 0.0)
        team.end()
        check(team.statuses, team.texts)
        if self._runner.counts:
            return job.said
        return [[{**step, "sent": 0.0} for step in steps] for steps in job.said]
