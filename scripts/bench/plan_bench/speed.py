"""At which speed the machine ran while trainings had their turns, by a block between them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.training_bench.session import Session
from bench.training_bench.turns import Job as Turns
from hybridcomp.plan.cost.job import Job
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
        """Ranks that time ``block`` (as ``hybridcomp measure --block`` has it)."""
        return cls(session.start([str(PROBE), block]))

    @property
    def count(self) -> int:
        """Turns so far."""
        return len(self.turns.said[0])

    def slowdown(self, cluster: Cluster, first: int) -> float:
        """How much longer than in ``cluster`` the block took from turn ``first`` on: all ranks."""
        # medians, as the measured ones are: of all that is timed here the mean is some percent more
        now = sum(
            statistics.median(turn["seconds"] for turn in said[first:]) for said in self.turns.said
        )
        then = sum(
            row.seconds.value for row in cluster.kernels
            if row.kind in KINDS and row.dtype == self.dtype
        )  # fmt: skip
        return now / then


def at_speed(job: Job, slowdown: float) -> Job:
    """``job`` where all that a rank computes, and what its engine does, takes so much longer."""
    kernels = tuple(
        replace(row, seconds=row.seconds.times(slowdown)) for row in job.cluster.kernels
    )
    hosts = {key: host.times(slowdown) for key, host in job.hosts.items()}
    return replace(job, cluster=replace(job.cluster, kernels=kernels), hosts=hosts, _seconds={})


def middle(values: Sequence[float]) -> float:
    """The mean without the largest and the smallest fifth, in which others had the machine."""
    ordered = sorted(values)
    cut = len(ordered) // 5
    return statistics.fmean(ordered[cut : len(ordered) - cut])
