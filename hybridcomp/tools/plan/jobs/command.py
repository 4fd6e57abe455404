"""Run ``hybridcomp plan --jobs``: decide, print, and write what starts the jobs; or replay them."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from hybridcomp import escaping
from hybridcomp.errors import ConfigError
from hybridcomp.tools.compare.report import aligned
from hybridcomp.tools.plan.answer.command import dtype_of
from hybridcomp.tools.plan.answer.report import duration
from hybridcomp.tools.plan.jobs import files, request
from hybridcomp.tools.plan.jobs.policies import Evolution, FirstIn, greedy
from hybridcomp.tools.plan.jobs.rates import Rates, has_saved
from hybridcomp.tools.plan.jobs.replay import compared
from hybridcomp.tools.plan.jobs.state import ClusterState, JobRates, Places, Shape
from hybridcomp.tools.plan.machines import cluster_file

LAUNCHERS: dict[str, tuple[str, ...]] = {"plain": (), "slurm": ("sbatch",)}
#: options for a single plan; with --jobs the jobs file gives their values for each job
OF_A_JOB = {
    "model": "MODEL", "samples": "--samples", "length": "--length", "ranks": "--ranks",
    "fix": "--fix", "base": "--base", "tries": "--try", "check": "--check", "plan": "--plan",
    "command": "-- COMMAND",
}  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Decide or replay, and return the exit status. Raises HybridcompError before any file."""
    for name, shown in OF_A_JOB.items():
        if given := getattr(options, name):
            todo = f"has no effect with --jobs; {options.jobs} says it of each job, or leave it out"
            raise ConfigError(shown, given, todo)
    cluster = cluster_file.read(options.cluster)
    options.dtype = dtype_of(options.dtype, cluster)
    shape = Shape.of(cluster)
    if not shape.is_even:
        todo = "expected as many on every node; describe the nodes that are alike"
        raise ConfigError(f"{options.cluster}: ranks", list(map(len, shape.nodes)), todo)
    jobs = request.read(options.jobs, cluster.world_size)
    rates = Rates(options, cluster, _table(options.out / files.TABLE))
    tasks = {job.name: rates.task(job, shape) for job in jobs.jobs}
    if options.replay:
        _replayed(
            [replace(one, is_fixed=False) for one in tasks.values()], shape, jobs.pause_seconds
        )
        return 0
    known = {job.name: job for job in jobs.jobs if job.arrival <= options.now or job.ranks.now}
    state = ClusterState(
        shape, {name: tasks[name] for name in known},
        {name: job.samples_left for name, job in known.items()},
        {name: job.ranks.now for name, job in known.items() if job.ranks.now},
        frozenset(name for name, job in known.items() if job.ranks.now or has_saved(job)),
        jobs.pause_seconds,
    )  # fmt: skip
    evolution = Evolution(kept=list(jobs.population))
    chosen = evolution(state)
    places = state.place(chosen)
    assert places is not None, "the search returns what fits"
    write = partial(files.write, jobs, places, rates, shape, evolution.kept)
    with tempfile.TemporaryDirectory() as place:  # a plan that no file can hold raises here
        write(Path(place))
    starts = write(options.out)
    _report(state, jobs, chosen, places)
    todo = "start these, once the jobs that go on or wait have saved and ended"
    print(f"{todo if starts else 'no job starts or changes now'}; next time give "
          f"{options.out / files.NEXT}, with samples_left as they are then")  # fmt: skip
    for start in starts:
        print("  " + escaping.shell_words([*LAUNCHERS[options.scheduler], start]))
    return 0


def _table(path: Path) -> dict[str, float | str]:
    """Read the predictions of the last call. Raises ConfigError if the file holds anything else."""
    if not path.exists():
        return {}
    found = cluster_file.document(path, "delete it: it is made again")
    if not isinstance(found, dict) or not all(
        isinstance(one, float | str) for one in found.values()
    ):
        raise ConfigError(str(path), "other values", "expected seconds of steps; delete it")
    return found


def _report(
    state: ClusterState, jobs: request.JobList, chosen: Mapping[str, int], places: Places
) -> None:
    """Print a row per known job, and the expected seconds of ``chosen`` and of simpler policies."""
    rows = [["job", "now", "then", "on ranks", "step", "ends in"]]
    for job in jobs.jobs:
        if job.name not in state.tasks:
            continue
        now, ranks = len(job.ranks.now), places.get(job.name, ())
        said = "keeps its ranks" if ranks == job.ranks.now else ",".join(map(str, ranks))
        if not ranks:
            rows.append([job.name, str(now), "0", "stops, waits" if now else "waits", "", ""])
            continue
        step = job.samples / state.tasks[job.name].rates[len(ranks)]
        end = duration(state.seconds(job.name, len(ranks)))
        rows.append([job.name, str(now), str(len(ranks)), said, duration(step), end])
    print(aligned(rows))
    told = {"this": chosen, "greedy": greedy(state), "first in, first out": FirstIn()(state)}
    means = [f"{name} {duration(state.expected(one))}" for name, one in told.items()]
    print(f"expected until a job ends, in the mean: {', '.join(means)}")


def _replayed(tasks: Sequence[JobRates], shape: Shape, pause: float) -> None:
    rows = [["policy", "mean completion", "all ended", "changes"]]
    for name, found in compared(tasks, shape, pause).items():
        hours = [f"{seconds / 60:.1f} min" for seconds in (found.mean_seconds, found.last_seconds)]
        rows.append([name, *hours, str(found.changes)])
    print(aligned(rows))
