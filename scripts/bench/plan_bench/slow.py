"""One of four ranks slowed by half: even stages against those of the planner.

Every rank has a share of a core, as a cgroup of its own grants it (``cpu.cfs_quota_us`` over
periods of some milliseconds); that of one rank is half of the others'. Nobody tells the planner: it
sees the measurement that ran under the same shares.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.plan_bench import trained
from bench.plan_bench.trained import Model
from hybridcomp.plan.choices import Choices
from hybridcomp.plan.cost.calibrate import calibrated
from hybridcomp.plan.cost.job import Job
from hybridcomp.plan.cost.predict import plan_of
from hybridcomp.plan.cost.work import work_of
from hybridcomp.plan.layout import Layout, even_cuts
from hybridcomp.plan.machines import cluster_file
from hybridcomp.plan.models.reading import read_model
from hybridcomp.plan.request import Batch, Limits
from hybridcomp.plan.search.placing import Placer
from lab.cluster import Lab
from lab.layout import LabError
from lab.layout import Layout as Nodes

RANKS, SLOW = 4, 1
#: of a core, for the others and for the slow one
SHARE, HALF = 0.44, 0.22
PERIOD_US = 10_000
GROUPS = Path("/sys/fs/cgroup/cpu")
MODEL = Model(layers=12, width=128, samples=16, micro_batch=2)
WARM = 2


class Compared(NamedTuple):
    """Both trainings: seconds a step, measured and predicted, blocks of each stage, losses."""

    speeds: list[float]
    even_cuts: list[int]
    planned_cuts: list[int]
    even: float
    planned: float
    even_predicted: float
    planned_predicted: float
    even_losses: list[float]
    planned_losses: list[float]


@dataclass(frozen=True)
class Shares:
    """The cgroups of the ranks. words: before a rank's command, they put it into its own."""

    groups: tuple[Path, ...]
    words: tuple[str, ...]

    def limit(self, on: bool) -> None:
        """Give every rank its share of a core, or all that there is."""
        for rank, group in enumerate(self.groups):
            share = HALF if rank == SLOW else SHARE
            quota = round(share * PERIOD_US) if on else -1
            (group / "cpu.cfs_quota_us").write_text(str(quota))


@contextlib.contextmanager
def shares() -> Iterator[Shares]:
    """Make the cgroups, without a limit yet; they are removed at the end.

    Raises LabError where this machine has no such cgroups (version 1 of the cpu controller).
    """
    if not (GROUPS / "cpu.cfs_quota_us").is_file():
        raise LabError(f"{GROUPS}: no cgroup v1 cpu controller; needed to slow a rank")
    stem = f"hcplan{os.getpid()}_"
    groups = tuple(GROUPS / f"{stem}{rank}" for rank in range(RANKS))
    try:
        for group in groups:
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        enter = f'echo $$ > {GROUPS}/{stem}$RANK/cgroup.procs && exec "$@"'
        yield Shares(groups, ("sh", "-c", enter, "sh"))
    finally:
        for group in groups:
            with contextlib.suppress(OSError):
                group.rmdir()


def compared(folder: Path, data: Path, seconds: float, turns: int) -> Compared:
    """Measure, plan, and train both in turns."""
    path = (folder / "slow_cluster.json").resolve()
    with shares() as own, Lab(Nodes.parse(str(RANKS))) as lab:
        own.limit(True)
        trained.measured(lab, MODEL, path, seconds, own.words)
        own.limit(False)  # imports of trainings take no part
        cluster = cluster_file.read(path)
        words = ["train_gpt.py", *MODEL.words, "--vocabulary", str(MODEL.vocabulary)]
        batch = Batch(MODEL.samples, MODEL.length)
        limits = Limits(dtype="fp32", recompute=False)
        job = calibrated(Job(read_model(words), cluster, batch, limits))
        count = MODEL.samples // MODEL.micro_batch
        layout = Layout(stages=RANKS, micro_batch=MODEL.micro_batch, accumulation=count)
        one, *middle, last = even_cuts(MODEL.layers, RANKS)
        even = layout.replace(cuts=(one + 1, *middle, last + 1))  # embedding and head
        works = [work_of(job, even), next(Placer(job).places(layout, False))]
        plans = [plan_of(job, work, Choices(), "native") for work in works]
        steps = WARM + turns + 1
        with trained.session(lab, RANKS, own.words) as session:
            jobs = [
                trained.started(
                    session, plan, cluster, MODEL, data, (folder / name).resolve(), steps
                )
                for name, plan in zip(("even", "planned"), plans, strict=True)
            ]
            own.limit(True)
            trained.turns(jobs, WARM + turns)
            took = [trained.seconds(one, WARM) for one in jobs]
            losses = [trained.losses(one) for one in jobs]
    said = [plan.prediction.seconds for plan in plans]
    cuts = [_blocks(plan.layout) for plan in plans]
    speeds = [round(speed, 3) for speed in cluster.speeds]
    return Compared(speeds, cuts[0], cuts[1], took[0], took[1], said[0], said[1], *losses)


def _blocks(layout: Layout) -> list[int]:
    """Blocks of every stage: its layers without embedding and head."""
    first, *middle, last = layout.cuts
    return [first - 1, *middle, last - 1]
