"""Predict a step of a placed layout with its choices, for people and for ``plan.json``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybridcomp.dimensions import DIMENSIONS, Dimension
from hybridcomp.tools.plan.choices import Choices
from hybridcomp.tools.plan.cost.calls import FREE, Price
from hybridcomp.tools.plan.cost.job import PlannedJob
from hybridcomp.tools.plan.cost.memory import device_nbytes, memory_of
from hybridcomp.tools.plan.cost.schedule import Task
from hybridcomp.tools.plan.cost.step import simulated, step_of
from hybridcomp.tools.plan.cost.times import HIGH, LOW, View
from hybridcomp.tools.plan.cost.work import StageWork, Work, price
from hybridcomp.tools.plan.plan import MEMORY_KINDS, Plan, Prediction, Span


def plan_of(job: PlannedJob, work: Work, choices: Choices, budget: str) -> Plan:
    """Build the plan of a layout and its choices, with its prediction."""
    return Plan(
        work.layout, choices, predicted(job, work, choices), job.model.name,
        job.cluster_name, budget, job.batch.length, job.limits.dtype, job.limits.engine,
        (job.model.repeated.start, job.model.repeated.stop),
        job.cluster.machines[: work.layout.ranks], _frozen(work),
    )  # fmt: skip


def _frozen(work: Work) -> float:
    """Return the share of the parameters of all stages that do not train."""
    values = sum(stage.dense + stage.experts for stage in work.stages)
    return 1 - sum(sum(stage.trained) for stage in work.stages) / values if values else 0.0


def predicted(job: PlannedJob, work: Work, choices: Choices) -> Prediction:
    """Predict seconds, memory and bytes of a step."""
    seconds, tasks = simulated(job, work, choices)
    sent = [_messages(job, work, stage, choices) for stage in work.stages]
    names = [name for name in DIMENSIONS if any(name in one for one in sent)]
    alone = step_of(job, work, choices, View(without=frozenset(DIMENSIONS)))
    busiest = max(_compute(work, stage) for stage in work.stages)
    exposed: dict[str, float] = {
        name: seconds - step_of(job, work, choices, View(without=frozenset([name])))
        for name in names
    }
    ranks = work.layout.ranks_per_stage
    table = [memory_of(job, work, stage, choices) for stage in range(len(work.stages))]
    fullest = max(table, key=device_nbytes)

    def most(name: Dimension, what: str) -> float:
        return max(float(getattr(one.get(name, FREE), what)) for one in sent)

    def job_wide(name: Dimension, what: str) -> float:
        return ranks * sum(float(getattr(one.get(name, FREE), what)) for one in sent)

    low, high = (step_of(job, work, choices, View(pick)) for pick in (LOW, HIGH))
    return Prediction(
        seconds=seconds, low=min(low, seconds), high=max(high, seconds),
        tokens_per_second=job.batch.samples * job.batch.length / seconds,
        compute_seconds=busiest, bubble_seconds=max(0.0, alone - busiest),
        codec_seconds=max(sum(one.coding.value for one in own.values()) for own in sent),
        memory={kind: fullest.get(kind, 0.0) for kind in MEMORY_KINDS},
        memory_by_stage=tuple(map(device_nbytes, table)),
        nbytes={name: most(name, "nbytes") for name in names},
        native_nbytes={name: most(name, "native_nbytes") for name in names},
        exposed=exposed,
        hidden={
            name: max(0.0, max(one.get(name, FREE).seconds.value for one in sent) - exposed[name])
            for name in names
        },
        job_nbytes={name: job_wide(name, "nbytes") for name in names},
        job_native_nbytes={name: job_wide(name, "native_nbytes") for name in names},
        job_codec_seconds={
            name: ranks * sum(one.get(name, FREE).coding.value for one in sent) for name in names
        },
        between_nbytes={name: most(name, "between_nbytes") for name in names},
        between_native_nbytes={name: most(name, "between_native_nbytes") for name in names},
        spans=tuple(_spans(work, tasks)),
    )  # fmt: skip


def _compute(work: Work, stage: StageWork) -> float:
    return work.layout.passes * stage.compute + stage.adam.value


def _messages(
    job: PlannedJob, work: Work, stage: StageWork, choices: Choices
) -> dict[Dimension, Price]:
    """Price the messages that a rank of ``stage`` sends in a step, by dimension."""
    found: dict[Dimension, Price] = {}
    for items, once in stage.messages():
        for item in items:
            cost = price(job, item, choices).times(1 if once else work.layout.passes)
            found[item.key[0]] = found.get(item.key[0], FREE).plus(cost)
    return {name: cost for name, cost in found.items() if cost.native_nbytes}


def _spans(work: Work, tasks: Sequence[Task]) -> Iterator[Span]:
    """Yield the tasks for a picture; a pass is split into compute and the messages it waits for."""
    for task in tasks:
        if task.end <= task.start:
            continue
        if task.what not in ("forward", "backward"):
            numbered = task.what in ("send", "reduce")
            label = f"{task.what} {task.micro_batch}" if numbered else task.what
            yield Span(label, task.resource, task.start, task.end)
            continue
        stage = work.stages[task.stage]
        passes = stage.backward if task.what == "backward" else stage.forward
        computed = min(task.end, task.start + passes[task.chunk].compute.value)
        yield Span(f"{task.what} {task.micro_batch}", task.resource, task.start, computed)
        if computed < task.end:
            yield Span(f"messages {task.micro_batch}", task.resource, computed, task.end)
