"""Predict the step of each job on each number of ranks it may have, and keep the predictions."""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hybridcomp import __version__
from hybridcomp.errors import ConfigError
from hybridcomp.tools.commands.replan import saved_job
from hybridcomp.tools.plan.answer.command import budget_of, infeasible, limits_of
from hybridcomp.tools.plan.jobs.request import Job
from hybridcomp.tools.plan.jobs.state import JobRates, Shape
from hybridcomp.tools.plan.machines import cluster_file
from hybridcomp.tools.plan.machines.cluster import Cluster
from hybridcomp.tools.plan.models.reading import read_model
from hybridcomp.tools.plan.request import Batch, Found, SearchLimits
from hybridcomp.tools.plan.search.search import search

_model = cache(read_model)


@dataclass
class Rates:
    """Predicts the seconds of a job's steps on ``cluster`` with the planner.

    known: seconds of a step, or why there is no plan, by a digest of all inputs of the search.
    """

    options: argparse.Namespace
    cluster: Cluster
    known: dict[str, float | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._cluster = json.dumps(cluster_file.to_json(self.cluster))
        self._fixed: dict[str, dict[str, Any]] = {}

    def found(self, job: Job, ranks: int) -> Found:
        """Search the fastest plan of ``job`` on ``ranks``."""
        batch, budget = Batch(job.samples, job.length), budget_of(self.options.budget)
        return search(_model(job.model), self.cluster, budget, batch, self._limits(job, ranks))

    def step(self, job: Job, ranks: int) -> float | str:
        """Return the seconds of a step on ``ranks``, or why no plan exists for them."""
        limits, budget = self._limits(job, ranks), self.options.budget
        asked = (__version__, _model(job.model), limits, budget, job.samples, job.length)
        key = hashlib.sha256(f"{asked!r} {self._cluster}".encode()).hexdigest()
        if key not in self.known:
            found = self.found(job, ranks)
            reason = "" if found.plans else infeasible(found)
            self.known[key] = reason or found.plans[0].prediction.seconds
        return self.known[key]

    def _limits(self, job: Job, ranks: int) -> SearchLimits:
        if job.name not in self._fixed:
            self._fixed[job.name] = _fixed(job)
        return limits_of(self.options, self._fixed[job.name], ranks, job.command, keep=1)

    def task(self, job: Job, shape: Shape) -> JobRates:
        """Return ``job`` with its rates. Raises ConfigError where it cannot train on its ranks."""
        limits, has = job.ranks, len(job.ranks.now)
        is_fixed = has > 0 and not (job.resumes or has_saved(job))
        sizes = [size for size in shape.sizes if limits.least <= size <= limits.most]
        wanted = [has] if is_fixed else sorted({*sizes, has} - {0})
        steps = {size: self.step(job, size) for size in wanted}
        rates = {size: job.samples / one for size, one in steps.items() if isinstance(one, float)}
        for key, ranks in (("now", has), ("asked", limits.asked)):
            if ranks and ranks not in rates and not (is_fixed and key == "asked"):
                todo = steps.get(ranks, f"expected one of {', '.join(map(str, sizes))}")
                raise ConfigError(f"{job.name}: ranks.{key}", ranks, str(todo))
        if not rates:
            why = next(iter(steps.values()), f"jobs get one of {', '.join(map(str, shape.sizes))}")
            shown = f"{limits.least} to {min(limits.most, shape.world_size)}"
            raise ConfigError(f"{job.name}: ranks", shown, str(why))
        inside = [size for size in rates if size <= shape.of_node]
        asked = limits.asked or max(inside, default=min(rates))
        return JobRates(
            job.name, rates, job.samples_left, asked, job.arrival, job.priority, is_fixed
        )


def has_saved(job: Job) -> bool:
    """Return whether ``job`` has a checkpoint to resume from."""
    folder = Path(job.checkpoint) if job.checkpoint else None
    return folder is not None and folder.is_dir() and any(folder.iterdir())


def _fixed(job: Job) -> dict[str, Any]:
    """Return the layout fields that are fixed by the job's ``fix`` or by its checkpoint."""
    if not has_saved(job):
        return dict(job.fix)
    saved, is_deepspeed = saved_job(Path(str(job.checkpoint)))
    found: dict[str, Any] = {"tensor": saved.tensor, **({} if saved.is_pipeline else {"stages": 1})}
    if is_deepspeed:
        found["zero_stage"] = saved.zero
    for name, value in found.items():
        if job.fix.get(name, value) != value:
            todo = f"the checkpoint {saved.folder} has {value}, which replan keeps"
            raise ConfigError(f"{job.name}: fix.{name}", job.fix[name], todo)
    return {**job.fix, **found}
