"""Compute the seconds of one step of a layout: passes, codecs and links of every stage.

Every stage runs its passes in a fixed order, so that the end of each pass follows from earlier
ends. A search computes the seconds some hundred thousand times; a prediction also lists the tasks.
A pass of a micro-batch occupies its stage's device, with codecs and the messages that the pass
waits for (sums of tensor parallelism). A send to the next stage occupies the link, and the stage
goes on when the send has ended, as in Megatron; slices are sent asynchronously, and DeepSpeed's
sends and receives block (``blocking_pipeline``). Gradients are reduced at the last backward pass,
whose compute hides a part of that (``overlap``); then come the optimizer and the gather of
parameters. Messages to other stages do not wait for messages to replicas.
"""

from __future__ import annotations

from typing import NamedTuple

from hybridcomp.tools.plan.choices import Choices
from hybridcomp.tools.plan.cost import blocking_pipeline
from hybridcomp.tools.plan.cost.job import PlannedJob
from hybridcomp.tools.plan.cost.schedule import Op, Task, order
from hybridcomp.tools.plan.cost.times import VIEW, StageTimes, View, are_blocking, stage_times
from hybridcomp.tools.plan.cost.work import Work
from hybridcomp.tools.plan.layout import Layout

#: most passes of a step that are simulated; the middle of longer steps is extrapolated
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
    """Return when each stage has finished passes and reductions; append its tasks to ``tasks``."""
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
                took = own.took(op)
                last = place == len(ops) - 1
                behind = None
                if last or (op.backward and op.chunk == 0 and own.reduces):
                    behind = _behind(own, op, begin, last, links[stage])
                    ready[stage], ends[op] = behind.free + behind.coding, behind.sent
                elif slices > 1:  # sends are posted, and a link transfers them one by one
                    ready[stage] = begin + took.busy
                    ends[op] = max(links[stage], ready[stage]) + took.sent
                else:
                    ready[stage] = ends[op] = begin + took.busy + took.sent
                if tasks is not None:
                    tasks += _tasks_of_pass(own, stage, op, begin, links[stage], behind)
                if slices > 1 and behind is None:
                    links[stage] = ends[op]
                place += 1
                left -= 1
            places[stage] = place
    return ready


def _source(op: Op, stage: int, layout: Layout, sent: list[dict[Op, float]]) -> float | None:
    """Return when the neighbour has sent the input of ``op``; None: that time is not known yet."""
    step, chunk = (1, op.chunk + 1) if op.backward else (-1, op.chunk - 1)
    if 0 <= stage + step < layout.stages:
        return sent[stage + step].get(op)
    if 0 <= chunk < layout.virtual:
        other = 0 if op.backward else layout.stages - 1
        return sent[other].get(Op(op.backward, chunk, op.micro_batch))
    return 0.0


class _Behind(NamedTuple):
    """Times of the reductions that follow a pass.

    Attributes:
        shared: when the reductions begin, while the device may still run the pass.
        gone: when the link to the replicas has transferred the reductions.
        sent: when the pass's own send has ended.
        coding: seconds for which the device codes after ``gone`` and ``sent``.
    """

    shared: float
    gone: float
    sent: float
    coding: float

    @property
    def free(self) -> float:
        """Return when the device begins to decode and encode for the reductions."""
        return max(self.gone, self.sent)


def _behind(own: StageTimes, op: Op, begin: float, last: bool, link: float) -> _Behind:
    """Return the reductions after a pass that begins at ``begin``.

    ``link``: when the sends posted before have ended.
    """
    took = own.took(op)
    reduced, wire, hidden = own.behind(took, op.backward and op.chunk == 0, last)
    shared = begin + took.busy - hidden
    sent = max(link, begin + took.busy) + took.sent
    return _Behind(shared, shared + wire, sent, sum(one.coding for one in reduced))


def _tasks_of_pass(
    own: StageTimes, stage: int, op: Op, begin: float, link: float, behind: _Behind | None
) -> list[Task]:
    """Return a pass that begins at ``begin``, its send, and the reductions ``behind`` it.

    ``link``: when the sends posted before have ended.
    """
    took = own.took(op)
    what = "backward" if op.backward else "forward"
    place = stage, op.chunk, op.micro_batch
    device, end = f"stage {stage}", begin + took.busy
    sending = max(link, end)
    send = Task("send", *place, f"link {stage}", sending, sending + took.sent)
    if behind is None:
        return [Task(what, *place, device, begin, end), send]
    return [
        Task(what, *place, device, begin, behind.shared),
        Task(what, *place, device, behind.shared, end),
        Task("reduce", *place, f"replicas {stage}", behind.shared, behind.gone),
        send,
        Task("code", *place, device, behind.free, behind.free + behind.coding),
    ]


def sample(layout: Layout) -> tuple[int, int]:
    """Return how many micro-batches to simulate, and how many more to add for the marginal time.

    The middle of 1F1B is steady: each further ``stages`` micro-batches take the same time. The
    second number is 0 if the whole step is simulated. With slices all micro-batches take the same
    time.
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
    """Return the seconds of a whole step, extrapolated if it is long.

    Appends to ``tasks`` the tasks of the micro-batches that ``sample`` selects.
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


def simulated(job: PlannedJob, work: Work, choices: Choices) -> tuple[float, list[Task]]:
    """Return the seconds of a step and its tasks by start, of fewer micro-batches if it is long."""
    tasks: list[Task] = []
    seconds = seconds_of(work.layout, stage_times(job, work, choices), tasks)
    return seconds, sorted(tasks, key=lambda task: (task.start, task.stage))
