"""One of four ranks slowed by half: even stages against those of the planner.

Every rank plays a slower processor (``lab.slow_processors``); that of one rank is half as fast as
the others'. Nobody tells the planner: it sees the measurement that ran on the same processors.
Gradients are not clipped: DeepSpeed's pipelines in fp32 clip by the norm of the first stage alone
(``clip_grad_norm_`` counts what has model parallel rank 0), and other cuts would be another
training.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from bench.plan_bench import trained
from bench.plan_bench.trained import Model
from hybridcomp.plan.choices import Choices
from hybridcomp.plan.cost.predict import plan_of
from hybridcomp.plan.cost.work import work_of
from hybridcomp.plan.layout import Layout, even_cuts
from hybridcomp.plan.machines import cluster_file
from hybridcomp.plan.search.placing import Placer
from lab.cluster import Lab
from lab.layout import Layout as Nodes
from lab.slow_processors import slow_processors

RANKS, SLOW = 4, 1
#: how many times slower than a core of this machine: the others, and the slow one
TIMES, SLOWER_TIMES = 2.5, 5.0
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


def compared(folder: Path, data: Path, seconds: float, turns: int) -> Compared:
    """Measure, plan, and train both in turns."""
    path = (folder / "slow_cluster.json").resolve()
    each = [SLOWER_TIMES if rank == SLOW else TIMES for rank in range(RANKS)]
    with slow_processors(each) as own, Lab(Nodes.parse(str(RANKS))) as lab:
        own.limit(True)
        trained.measured(lab, MODEL, path, seconds, own.words)
        own.limit(False)  # imports of trainings take no part
        cluster = cluster_file.read(path)
        job = MODEL.job(cluster)
        count = MODEL.samples // MODEL.micro_batch
        layout = Layout(stages=RANKS, micro_batch=MODEL.micro_batch, accumulation=count)
        one, *middle, last = even_cuts(MODEL.layers, RANKS)
        even = layout.replace(cuts=(one + 1, *middle, last + 1))  # embedding and head
        works = [work_of(job, even), next(Placer(job).places(layout, False))]
        plans = [plan_of(job, work, Choices(), "native") for work in works]
        steps = WARM + turns + 1
        with trained.session(lab, RANKS, own.words) as session:
            jobs = []
            for name, plan in zip(("even", "planned"), plans, strict=True):
                place = (folder / name).resolve()
                jobs.append(trained.started(
                    session, plan, cluster, MODEL, data, place, steps, gradient_clipping=0.0
                ))  # fmt: skip
            trained.turns(jobs, WARM)
            own.limit(True)
            trained.turns(jobs, turns)
            took = [trained.seconds(one, WARM) for one in jobs]
            losses = [trained.losses(one) for one in jobs]
    said = [plan.prediction.seconds for plan in plans]
    cuts = [_blocks(plan.layout) for plan in plans]
    speeds = [round(speed, 3) for speed in cluster.speeds]
    return Compared(speeds, cuts[0], cuts[1], took[0], took[1], said[0], said[1], *losses)


def _blocks(layout: Layout) -> list[int]:
    """Return blocks of every stage: its layers without embedding and head."""
    first, *middle, last = layout.cuts
    return [first - 1, *middle, last - 1]
