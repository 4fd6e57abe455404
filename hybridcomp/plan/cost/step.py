"""Simulate one step of a layout as a timeline: compute, codecs and links of every stage.

A pass of a micro-batch is one task of its stage's device, which includes the messages it waits for
(sums of tensor parallelism) and codecs; a send to the next stage is a task of the link to it, and
the stage goes on when it has been sent, as in Megatron; DeepSpeed's sends and receives block
(``meetings``). Gradients are reduced behind the last backward pass, of which ``overlap`` hides a
part; then come the optimizer and the gather of parameters. Messages to other stages do not wait for
messages to replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridcomp.plan.algorithms.timeline import Task, Timeline, simulate
from hybridcomp.plan.choices import Choices
from hybridcomp.plan.cost import blocking_pipeline
from hybridcomp.plan.cost.job import PlannedJob
from hybridcomp.plan.cost.recurrence import step_seconds
from hybridcomp.plan.cost.schedule import Name, Op, order
from hybridcomp.plan.cost.times import VIEW, StageTimes, View, meet, stage_times
from hybridcomp.plan.cost.work import Work
from hybridcomp.plan.layout import Layout

#: passes of a step that are simulated; of longer ones the middle is extrapolated
MOST_PASSES = 800


class _Builder:
    """Builds the tasks of a step.

    Their numbers do not depend on seconds, so that steps of one layout compare task by task.
    """

    def __init__(self, work: Work, times: tuple[StageTimes, ...], micro_batches: int) -> None:
        self.layout, self.times = work.layout, times
        self.copies = work.layout.offload
        layout = work.layout
        self.tasks: dict[int, Task] = {}
        self.names: dict[int, Name] = {}
        self._orders = [
            order(stage, layout.stages, layout.virtual, micro_batches, layout.slice_count)
            for stage in range(layout.stages)
        ]
        passes = [(stage, op) for stage, ops in enumerate(self._orders) for op in ops]
        #: the task whose end is the end of a pass and of its send
        self._sent = {key: 2 * index + 1 for index, key in enumerate(passes)}
        self._fresh = 2 * len(passes)

    def build(self) -> None:
        """Build all tasks."""
        for stage, ops in enumerate(self._orders):
            before: tuple[int, ...] = ()
            for op in ops:
                before = self._pass(stage, op, before, op is ops[-1])
            self._end(stage, before)

    def _put(self, number: int | None, name: Name, resource: str, seconds: float,
             after: tuple[int, ...]) -> int:  # fmt: skip
        if number is None:
            number, self._fresh = self._fresh, self._fresh + 1
        self.tasks[number], self.names[number] = Task(resource, seconds, after), name
        return number

    def _pass(self, stage: int, op: Op, before: tuple[int, ...], last: bool) -> tuple[int, ...]:
        """Add a pass, its send and its reductions; return the tasks that the next pass awaits."""
        own, sent = self.times[stage], self._sent[stage, op]
        device, link = f"stage {stage}", f"link {stage}"
        took = (own.backward if op.backward else own.forward)[op.chunk]
        what = "backward" if op.backward else "forward"
        place = (stage, op.chunk, op.micro_batch)
        reduced, wire, behind = own.behind(took, op.backward and op.chunk == 0, last)
        begun = self._put(sent - 1, Name(what, *place), device, took.busy - behind,
                          (*before, *self._source(stage, op)))  # fmt: skip
        if not reduced:
            gone = self._put(sent, Name("send", *place), link, took.sent, (begun,))
            return (begun if self.layout.slices else gone,)  # slices are posted
        rest = self._put(None, Name(what, *place), device, behind, (begun,))
        gone = self._put(None, Name("reduce", *place), f"replicas {stage}", wire, (begun,))
        self._put(sent, Name("send", *place), link, took.sent, (rest,))
        coding = sum(one.coding for one in reduced)
        coded = self._put(None, Name("code", *place), device, coding, (rest, gone, sent))
        return (coded,)

    def _source(self, stage: int, op: Op) -> tuple[int, ...]:
        """Return the task that sends the input of a pass; empty for the first chunk's input."""
        stages, virtual = self.layout.stages, self.layout.virtual
        step, chunk = (1, op.chunk + 1) if op.backward else (-1, op.chunk - 1)
        if 0 <= stage + step < stages:
            return (self._sent[stage + step, op],)
        if 0 <= chunk < virtual:
            other = 0 if op.backward else stages - 1
            return (self._sent[other, op._replace(chunk=chunk)],)
        return ()

    def _end(self, stage: int, before: tuple[int, ...]) -> None:
        """Add the optimizer, its copies to and from the host, and the gather of parameters."""
        own = self.times[stage]
        bus = f"bus {stage}"
        if self.copies:
            before = (self._put(None, Name("to_host", stage), bus, own.landed, before),)
        step = self._put(None, Name("adam", stage), f"stage {stage}", own.adam, before)
        if self.copies:
            step = self._put(None, Name("to_device", stage), bus, own.uploaded, (step,))
        gone = self._put(None, Name("gather", stage), f"replicas {stage}", own.gather.link, (step,))
        self._put(None, Name("code", stage), f"stage {stage}", own.gather.coding, (gone,))


@dataclass(frozen=True)
class Step:
    """A simulated step. seconds: of the whole step, also where only a part was simulated."""

    seconds: float
    timeline: Timeline
    names: dict[int, Name]


def tasks_of(
    work: Work, times: tuple[StageTimes, ...], micro_batches: int
) -> tuple[dict[int, Task], dict[int, Name]]:
    """Return the tasks of a step of ``micro_batches``, and their names."""
    if meet(times):
        return blocking_pipeline.tasks_of(work.layout, times, micro_batches)
    builder = _Builder(work, times, micro_batches)
    builder.build()
    return builder.tasks, builder.names


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


def seconds_of(layout: Layout, times: tuple[StageTimes, ...]) -> float:
    """Return the seconds of a whole step, extrapolated where it is long."""
    some, more = sample(layout)
    first = step_seconds(layout, times, some)
    if not more:
        return first
    slope = (step_seconds(layout, times, some + more) - first) / more
    return first + slope * (layout.accumulation - some)


def step_of(job: PlannedJob, work: Work, choices: Choices, view: View = VIEW) -> float:
    """Return the seconds of a step with the numbers and dimensions that ``view`` selects."""
    return seconds_of(work.layout, stage_times(job, work, choices, view))


def simulated(job: PlannedJob, work: Work, choices: Choices, view: View = VIEW) -> Step:
    """Simulate the step with its timeline, which shows fewer micro-batches of a long step."""
    times = stage_times(job, work, choices, view)
    tasks, names = tasks_of(work, times, sample(work.layout)[0])
    return Step(seconds_of(work.layout, times), simulate(tasks), names)
