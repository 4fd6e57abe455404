"""The bench of plans: which measurement counts, the speed of the machine, which turns count."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from bench.bench_plan import check_rising
from bench.plan_bench.speed import Probe, at_speed, fast, fastest
from hybridcomp.plan.choices import Choices
from hybridcomp.plan.cost.host import Host, Line
from hybridcomp.plan.cost.job import PlannedJob
from hybridcomp.plan.cost.step import step_of
from hybridcomp.plan.cost.work import work_of
from hybridcomp.plan.layout import Layout
from hybridcomp.plan.machines.cluster import Cluster
from hybridcomp.plan.machines.estimates import Estimate
from hybridcomp.plan.machines.rows import Kernel, Kind
from hybridcomp.plan.request import Batch, SearchLimits
from lab.layout import LabError
from tests.plan.clusters import cluster, small


def timed_blocks(forward: float, backward: float) -> Cluster:
    """Two ranks whose block took so many seconds each."""
    took: dict[Kind, float] = {"block_forward": forward, "block_backward": backward}
    rows = [
        Kernel(rank, kind, "fp32", 1e6, Estimate.exact(seconds), "")
        for rank in (0, 1)
        for kind, seconds in took.items()
    ]
    return Cluster((), kernels=tuple(rows))


def test_the_measurement_of_the_fastest_moment_counts() -> None:
    slow, quick = timed_blocks(1.0, 2.0), timed_blocks(1.5, 1.0)
    assert fastest([slow, quick, slow]) is quick


def test_slower_blocks_make_compute_slower_and_no_message() -> None:
    layout = Layout(data=2, micro_batch=2, accumulation=4, cuts=(6,))
    host = Host(Line(0.01), Line(0.02))
    job = PlannedJob(
        small(), cluster(nodes=2, ranks_per_node=1), Batch(16, 128), SearchLimits(dtype="fp32"),
        overlap=0.0, hosts={(0, "native"): host},
    )  # fmt: skip
    machines = job.cluster
    blocks = [
        Kernel(rank, kind, "fp32", size, Estimate.exact(0.5), "")
        for rank in (0, 1) for kind in ("block_forward", "block_backward") for size in (1e6, 1e9)
    ]  # fmt: skip
    job = replace(job, cluster=replace(machines, kernels=(*machines.kernels, *blocks)))
    plain, slow = (
        step_of(one, work_of(one, layout), Choices()) for one in (job, at_speed(job, 2.0))
    )
    (stage,) = work_of(job, layout).stages
    computed = 4 * (stage.compute + 0.01) + stage.adam.value + 0.02
    assert slow - plain == pytest.approx(computed, rel=0.01)


def test_the_block_between_steps_against_the_measured_one() -> None:
    # of the turns but the first, the last is a fast one of the second rank alone
    said = [
        [{"seconds": seconds} for seconds in each]
        for each in ((1.0, 4.0, 5.0, 60.0), (1.0, 3.0, 5.0, 2.0))
    ]
    turns: Any = SimpleNamespace(said=said)
    assert Probe(turns).slowdown(timed_blocks(1.0, 2.0), 1) == pytest.approx(8.5 / 6)
    assert Probe(turns).count == 4


def test_the_fastest_half_of_the_turns() -> None:
    assert fast([1.0, 100.0, 2.0, 3.0, 0.0]) == pytest.approx(1.0)
    assert fast([1.0, 3.0]) == pytest.approx(1.0)
    assert fast([7.0]) == pytest.approx(7.0)


@pytest.mark.parametrize("rates", [["2gbit", "600mbit"], ["1gbit", "1000mbit"], ["none", "1gbit"]])
def test_a_session_whose_rates_fall_is_refused(rates: list[str]) -> None:
    with pytest.raises(LabError, match="have to rise within a session"):
        check_rising(rates)


def test_rates_that_rise_are_taken() -> None:
    check_rising(["200mbit", "0.6gbit", "2gbit", "none"])
