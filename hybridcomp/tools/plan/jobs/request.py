"""Read the file of jobs that share a cluster."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from hybridcomp.errors import ConfigError
from hybridcomp.escaping import one_line
from hybridcomp.tools.plan.machines.cluster_file import config_error, document
from hybridcomp.tools.plan.machines.described import MOST_RANKS, Above, NotBelow, Whole
from hybridcomp.tools.plan.machines.rows import STRICT
from hybridcomp.tools.plan.request import MOST

TODO = "write it as docs/planning.md shows"
Samples = Annotated[int, Field(ge=1, le=MOST)]
Rank = Annotated[int, Field(ge=0, lt=MOST_RANKS)]


@dataclass(frozen=True)
class JobRanks:
    """The ranks of a job: limits, the number that it asks for, and the ranks that it has now.

    asked: number of ranks under the policy first in, first out; None: as many as fit into a node.
    """

    __pydantic_config__ = STRICT

    least: Whole = 1
    most: Whole = MOST_RANKS
    asked: Whole | None = None
    now: tuple[Rank, ...] = ()


@dataclass(frozen=True)
class Job:
    """A job that waits or runs.

    Attributes:
        name: name of the job, of its folder and of its Slurm job.
        model, length, samples, fix, base: as the options of ``hybridcomp plan``.
        samples_left: samples that the job has to train until it ends.
        priority: weight of the job's seconds in the mean over all jobs.
        arrival: time of arrival in seconds, on the clock of ``--now``.
        command: command that starts the job, with placeholders; empty: ``start_command.general``.
        checkpoint: folder from which ``hybridcomp replan`` resumes it.
        resumes: whether the script continues on other ranks by itself (``hybridcomp.resume``).
    """

    __pydantic_config__ = STRICT

    name: str
    model: str
    length: Samples
    samples: Samples
    samples_left: Above
    ranks: JobRanks = JobRanks()
    priority: Above = 1.0
    arrival: NotBelow = 0.0
    command: tuple[str, ...] = ()
    checkpoint: str | None = None
    resumes: bool = False
    fix: Mapping[str, Any] = field(default_factory=dict)
    base: str | None = None


@dataclass(frozen=True)
class JobList:
    """All jobs, the seconds that a change of ranks costs, and the last search's population."""

    __pydantic_config__ = STRICT

    jobs: Annotated[tuple[Job, ...], Field(min_length=1)]
    pause_seconds: NotBelow = 60.0
    population: tuple[Mapping[str, Whole], ...] = ()


_JOBS: TypeAdapter[JobList] = TypeAdapter(JobList)


def read(path: Path, world_size: int) -> JobList:
    """Read the jobs of a file for a cluster of ``world_size`` ranks. Raises ConfigError."""
    return parse(document(path, TODO), str(path), world_size)


def parse(found: object, path: str, world_size: int) -> JobList:
    """Check parsed JSON; errors show ``path``. Raises ConfigError."""
    try:
        jobs = _JOBS.validate_python(found)
    except ValidationError as error:
        raise config_error(error, path) from error
    for job in jobs.jobs:
        _check(f"{path}: {one_line(job.name)}", job)
    _once(f"{path}: name", [job.name for job in jobs.jobs])
    _once(f"{path}: ranks.now", [rank for job in jobs.jobs for rank in job.ranks.now])
    beyond = [rank for job in jobs.jobs for rank in job.ranks.now if rank >= world_size]
    if beyond:
        todo = f"the cluster has ranks 0 to {world_size - 1}"
        raise ConfigError(f"{path}: ranks.now", beyond[0], todo)
    return jobs


def _check(where: str, job: Job) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", job.name):
        todo = "expected up to 64 letters, digits and ._-, a letter or digit first"
        raise ConfigError(f"{where}: name", job.name, todo)
    if job.ranks.least > job.ranks.most:
        raise ConfigError(f"{where}: ranks.least", job.ranks.least, "expected at most ranks.most")
    if job.resumes and job.checkpoint is not None:
        todo = "expected only one of checkpoint (hybridcomp replan) and resumes (the script)"
        raise ConfigError(f"{where}: checkpoint", job.checkpoint, todo)


def _once(where: str, values: Sequence[str | int]) -> None:
    twice = [value for value, count in Counter(values).items() if count > 1]
    if twice:
        raise ConfigError(where, twice[0], "expected each one once, and it is there twice")
