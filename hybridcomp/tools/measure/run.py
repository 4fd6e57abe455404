"""Run one measurement, its parts one after the other, and build the cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from hybridcomp.codecs.words import DTYPES
from hybridcomp.collectives.hierarchical.discovery import Hierarchy
from hybridcomp.collectives.topology import discover
from hybridcomp.errors import ConfigError
from hybridcomp.job.devices import device_name
from hybridcomp.log import say
from hybridcomp.tools.measure.block import BlockSize
from hybridcomp.tools.measure.channels import channel_rows
from hybridcomp.tools.measure.clock import CallClock, clock_for, on_device
from hybridcomp.tools.measure.coders import (
    coding_rows,
    copy_rows,
    drive_rows,
    host_rows,
    merged,
)
from hybridcomp.tools.measure.kernels import kernel_rows, trained_size
from hybridcomp.tools.measure.links import link_rows, uplink_rows
from hybridcomp.tools.measure.machine import made, memory_nbytes
from hybridcomp.tools.measure.messages import message_rows
from hybridcomp.tools.measure.team import (
    Team,
    TimeBudget,
    connected,
    shapes_of,
    sites_of,
    uplink_shape,
)
from hybridcomp.tools.measure.trainings import training_rows
from hybridcomp.tools.plan.machines.cluster import Cluster
from hybridcomp.tools.plan.machines.rows import Coding, Copy, Kernel, Rank

#: fraction of the time at which each part ends
UNTIL = {
    "kernels": 0.12, "codecs": 0.24, "hosts": 0.26, "copies": 0.27, "drives": 0.29,
    "messages": 0.34, "channels": 0.42, "links": 0.64, "uplinks": 0.68, "trainings": 1.0,
}  # fmt: skip
#: least bytes of a block's value: its weight and its gradient, in fp32
BLOCK_NBYTES = 8.0
Row = TypeVar("Row", Coding, Copy)


def measure(
    device: torch.device,
    seconds: float,
    *,
    hierarchy: Hierarchy = "auto",
    dtype: str = "bf16",
    blocks: Sequence[BlockSize] = (),
    drive: Path | None = None,
) -> Cluster:
    """Measure the cluster that this job runs on; a collective over the job, the same on all ranks.

    Args:
        device: device of this rank.
        seconds: approximate limit of the measurement.
        hierarchy: as in the block: how ranks are assigned to nodes, and nodes to sites.
        dtype: dtype of messages.
        blocks: transformer blocks to time, as in the model to train; empty: default blocks.
        drive: folder on each node's drive in which files are timed.
    """
    with on_device(device):
        team = Team(device, discover(hierarchy))
        _check_room(team, blocks)
        budget = TimeBudget(seconds, team)
        with contextlib.closing(clock_for(device)) as clock:
            return _measured(team, clock, budget, dtype, blocks, drive)


def _measured(
    team: Team, clock: CallClock, budget: TimeBudget, dtype: str, blocks: Sequence[BlockSize],
    drive: Path | None,
) -> Cluster:  # fmt: skip
    """Measure part after part and return the cluster; a collective over the job."""
    kernels = kernel_rows(
        team, clock, budget.part(UNTIL["kernels"], "what each rank computes"), blocks
    )
    codecs = coding_rows(
        team, clock, budget.part(UNTIL["codecs"], "codecs, alone and beside matrix products")
    )
    hosts: list[Coding] = []
    if team.device.type == "cuda":  # a CPU is its own host
        hosts = host_rows(team, budget.part(UNTIL["hosts"], "codecs of the hosts"))
    copies = copy_rows(team, clock, budget.part(UNTIL["copies"], "copies between device and host"))
    cluster = _gathered(team, kernels, codecs, copies)
    part = budget.part(UNTIL["drives"], "files on the drive") if drive else None
    files = drive_rows(team, part, drive) if drive and part else []
    cluster = replace(
        cluster, host_codecs=tuple(_all_ranks(team, hosts)),
        drives=tuple(_all_ranks(team, files)),
        host_nbytes=memory_nbytes(torch.device("cpu"), 1),
    )  # fmt: skip
    if team.world_size > 1:
        cluster = _linked(team, clock, budget, cluster, dtype)
    cluster = _trained(team, clock, budget, cluster, blocks)
    spent = budget.spent()
    say(f"{spent:5.1f} s: done")
    return replace(cluster, made=made(team, spent, dtype))


def _check_room(team: Team, blocks: Sequence[BlockSize]) -> None:
    """Raise ConfigError on all ranks where a block exceeds a rank's memory; a collective."""
    of_rank = team.nodes.of_rank
    own = memory_nbytes(team.device, of_rank.count(of_rank[team.rank]))
    for block in blocks:
        needed = BLOCK_NBYTES * block.parameters
        if team.most([float(0 < own < needed)])[0]:
            todo = f"its weights and gradients take {needed / 1e9:.3g} GB, more than a rank has"
            raise ConfigError("--block", block.describe(), todo)


def _linked(
    team: Team, clock: CallClock, budget: TimeBudget, cluster: Cluster, dtype: str
) -> Cluster:
    """Return the cluster with timings of messages and links; a collective over the job."""
    sites = sites_of(team.nodes)
    shapes = connected(shapes_of(team.nodes.of_rank, sites=sites), team)
    groups = ", ".join(shape.describe() for shape in shapes)
    encoded, left_out = message_rows(
        team, clock, budget.part(UNTIL["messages"], f"encoded messages ({groups})"),
        shapes, dtype,
    )  # fmt: skip
    channels, more = channel_rows(
        team, clock, budget.part(UNTIL["channels"], "tp, pp, ep and cp through channels"),
        shapes, dtype,
    )  # fmt: skip
    links = link_rows(
        team, clock, budget.part(UNTIL["links"], "links, alone and with others at work"),
        shapes, DTYPES[dtype],
    )  # fmt: skip
    if sites:
        (shape,) = connected([uplink_shape(sites)], team)
        part = budget.part(UNTIL["uplinks"], "uplinks of sites, all their ranks at once")
        uplinks = uplink_rows(team, clock, part, shape, DTYPES[dtype])
        each = cluster.nodes // len(set(sites))
        cluster = replace(cluster, nodes_per_site=each, uplinks=tuple(uplinks))
    return replace(
        cluster, links=tuple(links), encoded=tuple(encoded), channels=tuple(channels),
        left_out=(*left_out, *more),
    )  # fmt: skip


def _trained(
    team: Team, clock: CallClock, budget: TimeBudget, cluster: Cluster, blocks: Sequence[BlockSize]
) -> Cluster:
    """Return the cluster with small trainings, and their block timed in the same rounds."""
    part = budget.part(UNTIL["trainings"], "small trainings by the engine")
    size = blocks[0] if blocks else trained_size(team.device)
    memory = cluster.ranks[team.rank].nbytes
    trainings, own = training_rows(team, clock, part, size, memory)
    newer = {_case(row): row for rows in team.gather(own) for row in rows}
    kernels = [
        replace(row, seconds=newer.pop(_case(row)).seconds) if _case(row) in newer else row
        for row in cluster.kernels
    ]
    return replace(cluster, kernels=(*kernels, *newer.values()), trainings=tuple(trainings))


def _case(row: Kernel) -> tuple[object, ...]:
    return row.rank, row.kind, row.dtype, row.size


def _gathered(
    team: Team, kernels: Sequence[Kernel], codecs: Sequence[Coding], copies: Sequence[Copy]
) -> Cluster:
    """Gather the rows of all ranks' devices into a cluster; a collective over the job."""
    of_rank = team.nodes.of_rank
    node = of_rank[team.rank]
    products = sorted((row for row in kernels if row.kind == "product"), key=lambda row: row.size)
    own = Rank(
        node, device_name(team.device), memory_nbytes(team.device, of_rank.count(node)),
        {row.dtype: row.seconds.inverse(row.size) for row in products},  # of the largest
    )  # fmt: skip
    said = team.gather((own, tuple(kernels), tuple(codecs), tuple(copies)))
    return Cluster(
        tuple(rank for rank, *_ in said),
        codecs=tuple(_merged(row for _, _, rows, _ in said for row in rows)),
        copies=tuple(_merged(row for *_, rows in said for row in rows)),
        kernels=tuple(row for _, rows, *_ in said for row in rows),
    )


def _all_ranks(team: Team, own: Sequence[Row]) -> list[Row]:
    """Gather and merge the rows of all ranks; a collective over the job."""
    return _merged(row for rows in team.gather(tuple(own)) for row in rows)


def _merged(rows: Iterable[Row]) -> list[Row]:
    """Merge, for each case, the rows of all ranks that timed it."""
    cases: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = tuple(value for name, value in vars(row).items() if name != "seconds")
        cases.setdefault(key, []).append(row)
    return [replace(own[0], seconds=merged([row.seconds for row in own])) for own in cases.values()]
