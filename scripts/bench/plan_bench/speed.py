"""At which speed the machine ran while trainings had their turns, by a block between them.

Others share the machine's cores, and make all that runs on them slower for seconds, never faster.
So of whatever is timed again and again the fastest half counts (``fast``), and of several
measurements the one whose block was fastest (``fastest``). A step needs all ranks: of the block the
mean over them in the same turn is what is timed, not each rank's own fast moments.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.training_bench.session import Session
from bench.training_bench.turns import Job as Turns
from hybridcomp.plan.cost.job import PlannedJob
from hybridcomp.plan.machines.cluster import Cluster

PROBE = Path(__file__).with_name("probe.py")
KINDS = ("block_forward", "block_backward")


@dataclass(frozen=True)
class Probe:
    """The block on all ranks, as a job that takes turns."""

    turns: Turns
    dtype: str = "fp32"

    @classmethod
    def started(cls, session: Session, block: str) -> Probe:
        """Start ranks that time ``block`` (as ``hybridcomp measure --block`` has it)."""
        return cls(session.start([str(PROBE), block]))

    @property
    def count(self) -> int:
        """Turns so far."""
        return len(self.turns.said[0])

    def slowdown(self, cluster: Cluster, first: int) -> float:
        """Divide the block's seconds of all ranks, from turn ``first`` on, by ``cluster``'s."""
        turns = zip(*(said[first:] for said in self.turns.said), strict=True)
        now = fast([sum(rank["seconds"] for rank in turn) for turn in turns])
        return now / block_seconds(cluster, self.dtype)


def at_speed(job: PlannedJob, slowdown: float) -> PlannedJob:
    """Return ``job`` with all compute of ranks and engines slower by the factor ``slowdown``."""
    kernels = tuple(
        replace(row, seconds=row.seconds.times(slowdown)) for row in job.cluster.kernels
    )
    hosts = {key: host.times(slowdown) for key, host in job.hosts.items()}
    return replace(job, cluster=replace(job.cluster, kernels=kernels), hosts=hosts, _seconds={})


def block_seconds(cluster: Cluster, dtype: str = "fp32") -> float:
    """Return both passes of the block that ``cluster`` was measured with, of all ranks together."""
    return sum(
        row.seconds.value for row in cluster.kernels if row.kind in KINDS and row.dtype == dtype
    )


def fastest(clusters: Sequence[Cluster]) -> Cluster:
    """Return the measurement that ran while the machine was at its fastest."""
    return min(clusters, key=block_seconds)


def fast(values: Sequence[float]) -> float:
    """Return the mean of the fastest half."""
    ordered = sorted(values)
    return statistics.fmean(ordered[: (len(ordered) + 1) // 2])
