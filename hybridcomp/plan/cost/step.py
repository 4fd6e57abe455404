"""Compute the seconds of one step of a layout: passes, codecs and links of every stage.

Every stage does its passes in a fixed order, so that their ends follow from each other; a search
asks for the seconds some hundred thousand times, and a prediction also for the tasks that took
them. A pass of a micro-batch occupies its stage's device, with the messages it waits for (sums of
tensor parallelism) and codecs; a send to the next stage occupies the link to it, and the stage goes
on when it has been sent, as in Megatron; slices are posted, and DeepSpeed's sends and receives
block (``blocking_pipeline``). Gradients are reduced behind the last backward pass, of which
``overlap`` hides a part; then come the optimizer and the gather of parameters. Messages to other
stages do not wait for messages to replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridcomp.plan.choices import Choices
from hybridcomp.plan.cost import blocking_pipeline
from hybridcomp.plan.cost.job import PlannedJob
from hybridcomp.plan.cost.schedule import Op, Task, order
from hybridcomp.plan.cost.times import VIEW, StageTimes, View, are_blocking, stage_times
from hybridcomp.plan.cost.work import Work
from hybridcomp.plan.layout import Layout

#: passes of a step that are simulated; of longer ones the middle is extrapolated
MOST_PASSES = 800


def step_seconds(
    layout: Layout,
    times: tuple[StageTimes, ...],
    micro_batches: int,
    tasks: list[Task] | None = None,
) -> float:
    """Return the seconds of a step of ``micro_batches``; append its tasks to ``tasks``."""
    if are_blocking(times):
        ready = blocking_pipeline.last_ends(layout, times, micro_batches, tasks)
    else:
        ready = _last_ends(layout, times, micro_batches, tasks)
    if tasks is not None:
        for stage, (own, end) in enumerate(zip(times, ready, strict=True)):
            tasks += own.end_tasks(stage, end)
    return max(end + own.optimizer + own.gather.both for own, end in zip(times, ready, strict=True))


def _last_ends(
    layout: Layout,
    times: tuple[StageTimes, ...],
    micro_batches: int,
    tasks: list[Task] | None,
) -> list[float]:
    """Return when each stage has done its passes and their reductions; append to ``tasks``."""
    stages = layout.stages
    slices = layout.slice_count
    orders = [
        order(stage, stages, layout.virtual, micro_batches, slices) for stage in range(stages)
    ]
    places, ready, links = [0] * stages, [0.0] * stages, [0.0] * stages
    sent: list[dict[Op, float]] = [{} for _ in range(stages)]
    left = sum(map(len, orders))
    while left:
        for stage in range(stages):
            ops, place, own, ends = orders[stage], places[stage], times[stage], sent[stage]
            while place < len(ops):
                op = ops[place]
                source = _source(op, stage, layout, sent)
                if source is None:
                    break
                begin = max(ready[stage], source)
                took = (own.backward if op.backward else own.forward)[op.chunk]
                last = place == len(ops) - 1
                reduces = last or (op.backward and op.chunk == 0 and own.reduces)
                if reduces:
                    ready[stage], ends[op] = _reduced(own, op, begin, last, links[stage])
                elif slices > 1:  # sends are posted, and the link does one after the other
                    ready[stage] = begin + took.busy
                    ends[op] = max(links[stage], ready[stage]) + took.sent
                else:
                    ready[stage] = ends[op] = begin + took.busy + took.sent
                if tasks is not None:
                    tasks += _tasks_of_pass(own, stage, op, begin, links[stage], last, reduces)
                if slices > 1 and not reduces:
                    links[stage] = ends[op]
                place += 1
                left -= 1
            places[stage] = place
    return ready


def _source(op: Op, stage: int, layout: Layout, sent: list[dict[Op, float]]) -> float | None:
    """Return when the neighbour has sent the input of ``op``; None where that is not made yet."""
    step, chunk = (1, op.chunk + 1) if op.backward else (-1, op.chunk - 1)
    if 0 <= stage + step < layout.stages:
        return sent[stage + step].get(op)
    if 0 <= chunk < layout.virtual:
        other = 0 if op.backward else layout.stages - 1
        return sent[other].get(Op(op.backward, chunk, op.micro_batch))
    return 0.0


def _reduced(own: StageTimes, op: Op, begin: float, last: bool, link: float) -> tuple[float, float]:
    """Return when a pass with reductions behind it frees its stage, and when its send has ended.

    ``link``: when the sends posted before have ended.
    """
    took = (own.backward if op.backward else own.forward)[op.chunk]
    reduced, wire, behind = own.behind(took, op.backward and op.chunk == 0, last)
    gone = begin + took.busy - behind + wire
    done = max(link, begin + took.busy) + took.sent
    return max(gone, done) + sum(one.coding for one in reduced), done


def _tasks_of_pass(
    own: StageTimes, stage: int, op: Op, begin: float, link: float, last: bool, reduces: bool
) -> list[Task]:
    """Return a pass that begins at ``begin``, its send, and its reductions where it ``reduces``.

    ``link``: when the sends posted before have ended.
    """
    took = (own.backward if op.backward else own.forward)[op.chunk]
    what = "backward" if op.backward else "forward"
    place = stage, op.chunk, op.micro_batch
    device, end = f"stage {stage}", begin + took.busy
    sending = max(link, end)
    done = sending + took.sent
    send = Task("send", *place, f"link {stage}", sending, done)
    if not reduces:
        return [Task(what, *place, device, begin, end), send]
    reduced, wire, behind = own.behind(took, op.backward and op.chunk == 0, last)
    shared = begin + took.busy - behind  # the device goes on while gradients are reduced
    gone = shared + wire
    free = max(gone, done)
    return [
        Task(what, *place, device, begin, shared),
        Task(what, *place, device, shared, end),
        Task("reduce", *place, f"replicas {stage}", shared, gone),
        send,
        Task("code", *place, device, free, free + sum(one.coding for one in reduced)),
    ]


@dataclass(frozen=True)
class Step:
    """A step with its tasks, by their start.

    seconds: of the whole step, also where ``tasks`` are of fewer micro-batches.
    """

    seconds: float
    tasks: tuple[Task, ...]


def sample(layout: Layout) -> tuple[int, int]:
    """Return micro-batches to simulate, and how many more to simulate for the slope of the rest.

    1F1B is steady in between: every ``stages`` micro-batches more take the same time. The second
    number is 0 where the whole step is simulated. With slices every micro-batch takes the same.
    """
    count, stages = layout.accumulation, layout.stages
    some = stages * (2 + layout.virtual)
    if layout.slices:
        return (2, 1) if 2 * layout.passes * stages > MOST_PASSES and count > 3 else (count, 0)
    if 2 * count * stages * layout.virtual <= MOST_PASSES or count <= some + stages:
        return count, 0
    return some + (count - some) % stages, stages


def seconds_of(
    layout: Layout, times: tuple[StageTimes, ...], tasks: list[Task] | None = None
) -> float:
    """Return the seconds of a whole step, extrapolated where it is long.

    Appends to ``tasks`` those of the micro-batches that ``sample`` names.
    """
    some, more = sample(layout)
    first = step_seconds(layout, times, some, tasks)
    if not more:
        return first
    slope = (step_seconds(layout, times, some + more) - first) / more
    return first + slope * (layout.accumulation - some)


def step_of(job: PlannedJob, work: Work, choices: Choices, view: View = VIEW) -> float:
    """Return the seconds of a step with the numbers and dimensions that ``view`` selects."""
    return seconds_of(work.layout, stage_times(job, work, choices, view))


def simulated(job: PlannedJob, work: Work, choices: Choices, view: View = VIEW) -> Step:
    """Simulate the step with its tasks, which show fewer micro-batches of a long step."""
    tasks: list[Task] = []
    seconds = seconds_of(work.layout, stage_times(job, work, choices, view), tasks)
    return Step(seconds, tuple(sorted(tasks, key=lambda task: (task.start, task.stage))))
