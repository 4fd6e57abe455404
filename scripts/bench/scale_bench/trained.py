"""Trainings of 2 to 16 ranks on this machine, against what the planner's model says of them.

All ranks are processes of this machine that share its cores. `hybridcomp measure` runs on all of
them and has one and three blocks trained; then DeepSpeed trains BLOCKS blocks, which the model
predicts from the measurement alone.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.bench_start import free_port
from hybridcomp.collectives.topology import discover
from hybridcomp.measure import trainings
from hybridcomp.measure.block import BlockSize, TransformerBlock
from hybridcomp.measure.run import measure
from hybridcomp.measure.team import Team
from hybridcomp.plan.cost.calibrate import calibrated
from hybridcomp.plan.cost.host import SmallModel, choices_of
from hybridcomp.plan.cost.job import PlannedJob
from hybridcomp.plan.cost.step import step_of
from hybridcomp.plan.cost.work import work_of
from hybridcomp.plan.layout import Layout
from hybridcomp.plan.machines.cluster import Cluster
from hybridcomp.plan.machines.rows import TrainedSmall
from hybridcomp.plan.request import Batch, SearchLimits

#: blocks that are trained, which no measurement has seen, and their size
BLOCKS, SIZE = 6, BlockSize.parse("1x64x192x4")
#: ZeRO stages and blocks of compression
NATIVE: Mapping[str, Any] = {}
EIGHT, RECOMMENDED = trainings.STYLES
TRIED = (("native", 0, NATIVE), ("8 bits", 0, EIGHT), ("native", 1, NATIVE),
         ("recommended", 1, RECOMMENDED))  # fmt: skip
#: rounds of steps, and how many come before those that count
ROUNDS, WARM = 10, 2
PATIENCE_S = 1500.0


def compared(ranks: int, seconds: float, folder: Path) -> list[dict[str, Any]]:
    """Measure and train among ``ranks`` processes; return predicted and measured steps.

    Raises RuntimeError where a rank ends with an error or does not end.
    """
    os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    import deepspeed  # noqa: F401  (once, before the ranks are forked)

    torch.set_num_threads(1)
    path = folder / f"trained_{ranks}.json"
    path.unlink(missing_ok=True)
    context = multiprocessing.get_context("fork")
    every = [
        context.Process(target=_rank, args=(rank, ranks, seconds, path)) for rank in range(ranks)
    ]
    for one in every:
        one.start()
    end = time.monotonic() + PATIENCE_S
    for one in every:
        one.join(max(0.0, end - time.monotonic()))
    for one in every:
        if one.is_alive():
            one.kill()
    codes = [one.exitcode for one in every]
    if any(codes) or not path.is_file():
        raise RuntimeError(f"{ranks} ranks ended with {codes}")
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def _rank(rank: int, ranks: int, seconds: float, path: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    device = torch.device("cpu")
    cluster = measure(device, seconds, dtype="fp32", blocks=[SIZE])
    rows, taken = _trained(Team(device, discover("auto")))
    found = [
        {"ranks": ranks, "name": name, "zero": stage, "predicted_s": predicted(cluster, row),
         "measured_s": statistics.median(steps), "low_s": min(steps), "high_s": max(steps)}
        for (name, stage, _), row, steps in zip(TRIED, rows, taken, strict=True)
    ]  # fmt: skip
    if rank == 0:
        path.write_text(json.dumps(found, indent=1) + "\n")
    dist.barrier()
    os._exit(0)  # gloo's threads and forked modules have nothing left to do


def _trained(team: Team) -> tuple[list[TrainedSmall], list[list[float]]]:
    """Train all of TRIED in turns; return rows, and seconds of every step of the slowest rank."""
    parameters = sum(one.numel() for one in TransformerBlock(SIZE).parameters())
    with trainings._installed():
        jobs = [
            trainings._started(
                team, SIZE, torch.float32, stage, trainings._acting(block, stage), BLOCKS
            )
            for _, stage, block in TRIED
        ]
        for _ in range(ROUNDS):
            for job in jobs:
                team.barrier()
                job.step()
        rows = [trainings._row(team, job, SIZE, parameters, "fp32") for job in jobs]
        ends = [team.most([step[-1] for step in job.steps[WARM:]]) for job in jobs]
    return rows, ends


def predicted(cluster: Cluster, row: TrainedSmall) -> float:
    """Return the seconds of a step of three micro-batches that the model says."""
    ranks, micro = cluster.world_size, trainings.MICRO_BATCHES
    limits = SearchLimits(dtype=row.dtype, bucket_numel=float(row.blocks * row.parameters))
    batch = Batch(ranks * row.samples * micro, row.length)
    job = calibrated(PlannedJob(SmallModel(row), cluster, batch, limits))
    layout = Layout(
        data=ranks, zero_stage=row.zero_stage, micro_batch=row.samples, accumulation=micro,
        cuts=(row.blocks,),
    )  # fmt: skip
    return step_of(job, work_of(job, layout), choices_of(row))


def misses(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return by how much predictions miss, as shares of what was measured."""
    return [row["predicted_s"] / row["measured_s"] - 1 for row in rows]
