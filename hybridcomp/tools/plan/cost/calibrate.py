"""Calibrate a job's engine overhead: compare predicted and measured seconds of small trainings."""

from __future__ import annotations

from dataclasses import replace

from hybridcomp.tools.plan.cost.host import OverheadModel, Taken, choices_of, hosts_of
from hybridcomp.tools.plan.cost.job import PlannedJob
from hybridcomp.tools.plan.cost.step import step_of
from hybridcomp.tools.plan.cost.work import work_of
from hybridcomp.tools.plan.layout import Layout
from hybridcomp.tools.plan.machines.cluster import Cluster
from hybridcomp.tools.plan.machines.rows import TrainedSmall
from hybridcomp.tools.plan.request import Batch, SearchLimits


def calibrated(job: PlannedJob) -> PlannedJob:
    """Return ``job`` with overheads from its engine's small trainings; unchanged without any."""
    rows = [row for row in job.cluster.trainings if row.engine == job.limits.engine]
    if not rows:
        return job
    return replace(job, hosts=hosts_of(_taken(job.cluster, row) for row in rows))


def _taken(cluster: Cluster, row: TrainedSmall) -> Taken:
    """Price a small training by layers and messages alone; compute hides nothing."""
    values = float(row.blocks * row.parameters)
    limits = SearchLimits(dtype=row.dtype, engine="deepspeed", bucket_numel=values)
    data = cluster.world_size
    seconds = []
    for count in (1, 2):
        batch = Batch(data * row.samples * count, row.length)
        job = PlannedJob(OverheadModel(row), cluster, batch, limits, overlap=0.0)
        layout = Layout(
            data=data, zero_stage=row.zero_stage, micro_batch=row.samples, accumulation=count,
            cuts=(row.blocks,),
        )  # fmt: skip
        work = work_of(job, layout)
        seconds.append(step_of(job, work, choices_of(row)))
        compute = work.stages[0].compute
    return Taken(row, seconds[1] - seconds[0], seconds[0], compute)
