"""An engine's overhead from small trainings, and plans that include it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from hybridcomp.tools.plan.choices import Choices
from hybridcomp.tools.plan.cost import calibrate
from hybridcomp.tools.plan.cost.host import Host, Line, nearest
from hybridcomp.tools.plan.cost.job import PlannedJob
from hybridcomp.tools.plan.cost.step import simulated, step_of
from hybridcomp.tools.plan.cost.work import work_of
from hybridcomp.tools.plan.layout import Layout
from hybridcomp.tools.plan.machines.cluster import Cluster
from hybridcomp.tools.plan.machines.estimates import Estimate
from hybridcomp.tools.plan.machines.rows import TrainedSmall
from hybridcomp.tools.plan.request import Batch, SearchLimits
from tests.tools.plan.clusters import cluster, small

FEEDBACK: Mapping[str, Any] = {"preset": "recommended", "dp": {"error_feedback": True}}
#: overhead of the made-up engine: per micro-batch and step, constant and per value
MICRO, STEP, MORE = Line(2e-3, 1e-9), Line(5e-3, 3e-9), 4e-9
PARAMETERS = 1_000_000


def taken(stage: int, blocks: int, block: Mapping[str, Any], machines: Cluster) -> TrainedSmall:
    """Train with that engine on ``machines``; return the price, and the engine's overhead."""
    zero = Estimate.exact(0.0)
    row = TrainedSmall(
        "deepspeed", stage, "fp32", blocks, 1e8, PARAMETERS, 2, 64, zero, zero, block
    )
    price = calibrate._taken(machines, row)
    values, more = blocks * PARAMETERS, MORE if block else 0.0
    micro = price.micro + MICRO.at(values)
    last = price.last + MICRO.at(values) + STEP.at(values) + more * values
    return replace(row, micro=Estimate.exact(micro), last=Estimate.exact(last))


def measured(stage: int = 0, factor: float = 1.0) -> Cluster:
    """Return a cluster with small trainings, their seconds multiplied by ``factor``."""
    machines = cluster(nodes=2, ranks_per_node=1)
    rows = [taken(stage, blocks, {}, machines) for blocks in (1, 3)]
    rows.append(taken(stage, 3, FEEDBACK, machines))
    rows = [
        replace(row, micro=row.micro.times(factor), last=row.last.times(factor)) for row in rows
    ]
    return replace(machines, trainings=tuple(rows))


def job_on(machines: Cluster) -> PlannedJob:
    limits = SearchLimits(dtype="fp32", recompute=False)
    return PlannedJob(small(), machines, Batch(16, 128), limits, overlap=0.0)


def test_the_lines_of_an_engine_come_back() -> None:
    job = calibrate.calibrated(job_on(measured()))
    native, more = job.hosts[0, "native"], job.hosts[0, "feedback"]
    for found, wanted in ((native.micro, MICRO), (native.step, STEP)):
        assert found == pytest.approx(wanted, rel=1e-6)
    assert more.micro.per_value == pytest.approx(MICRO.per_value, rel=1e-6)
    assert more.step.per_value == pytest.approx(STEP.per_value + MORE, rel=1e-6)
    assert native.overlap == 0.0
    # an untrained stage or style uses the most similar ones
    assert nearest(job.hosts, 2, "native") == native
    assert nearest(job.hosts, 2, "feedback") == more
    assert nearest({}, 0, "native") == Host()


@pytest.mark.parametrize("stages", [1, 2])
def test_a_plan_has_it_on_top(stages: int) -> None:
    machines = measured()
    layout = Layout(
        data=2 // stages, stages=stages, micro_batch=2, accumulation=4, hierarchy=False,
        cuts=(6,) if stages == 1 else (3, 3),
    )  # fmt: skip
    plain, known = job_on(machines), calibrate.calibrated(job_on(machines))
    steps = [step_of(job, work_of(job, layout), Choices()) for job in (plain, known)]
    work = work_of(known, layout)
    assert simulated(known, work, Choices())[0] == steps[1]
    values = work.stages[0].dense
    if stages == 1:
        wanted = 4 * MICRO.at(values) + STEP.at(values)
        assert steps[1] - steps[0] == pytest.approx(wanted, rel=1e-6)
    else:
        assert steps[1] - steps[0] > 4 * MICRO.at(values)


def test_what_was_hidden_counts_as_overlap_and_nothing_is_below_zero() -> None:
    job = calibrate.calibrated(job_on(measured(factor=0.5)))
    for host in job.hosts.values():
        assert min(host.micro.each, host.micro.per_value, host.step.each, host.step.per_value) >= 0
        assert 0.0 < host.overlap <= 1.0


def test_bounds_are_below_every_choice_and_other_engines_know_nothing() -> None:
    job = calibrate.calibrated(job_on(measured()))
    layout = Layout(data=2, micro_batch=2, accumulation=4, cuts=(6,))
    least = job.host(layout, 0, None)
    for choices in (Choices(), Choices.of_block(dict(FEEDBACK))):
        found = job.host(layout, 0, choices)
        assert least.micro.at(1e6) <= found.micro.at(1e6)
        assert least.step.at(1e6) <= found.step.at(1e6)
    other = replace(job_on(measured()), limits=SearchLimits(engine="megatron", dtype="fp32"))
    assert calibrate.calibrated(other).hosts == {}
