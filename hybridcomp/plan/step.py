"""One step of a layout as a timeline: compute, codecs and links of every stage.

A pass of a micro-batch is one task of its stage's device, with what it waits for inside (sums of
tensor parallelism, codecs); what goes to the next stage is a task of the link that leads there, and
the stage goes on when it has been sent, as the engines do it. Gradients travel behind the last
backward pass, of which ``overlap`` hides a part; then the optimizer, then the gather of parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hybridcomp.plan.choices import Choices
from hybridcomp.plan.figures import Figure
from hybridcomp.plan.job import Job
from hybridcomp.plan.prices import Price
from hybridcomp.plan.schedule import Op, order
from hybridcomp.plan.timeline import Task, Timeline, simulate
from hybridcomp.plan.work import Items, Stage, Wish, Work, price

#: passes of a step that are simulated; of longer ones the middle is extrapolated
MOST_PASSES = 1500
#: which number of a figure counts
VALUE, LOW, HIGH = 0, 1, 2


class Seconds(NamedTuple):
    """Of some messages: the device in codecs, and links."""

    coding: float
    link: float

    @property
    def both(self) -> float:
        """One after the other."""
        return self.coding + self.link


@dataclass(frozen=True)
class View:
    """How a step is looked at: with which number of every figure, and without which dimensions."""

    pick: int = VALUE
    without: frozenset[str] = frozenset()

    def of(self, figure: Figure) -> float:
        """The number that counts."""
        return float(figure[self.pick])


def seconds(job: Job, items: Items, choices: Choices | Wish, view: View) -> Seconds:
    """What ``items`` take."""
    coding = link = 0.0
    for item in items:
        if item.key[0] in view.without:
            continue
        found: Price = price(job, item, choices)
        coding += view.of(found.coding)
        link += view.of(found.wire) + view.of(found.inside)
    return Seconds(coding, link)


class Durations(NamedTuple):
    """Of a chunk's pass: what its device is busy or waits with, and what it sends.

    compute: of ``busy`` the device's own work. Decoding what was sent counts for the sender.
    """

    busy: float
    sent: float
    compute: float


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one stage: passes by virtual stage, what follows each of them, and the end.

    hidden_micro, hidden_step: compute behind which messages of a micro-batch, or of the step, hide.
    """

    forward: tuple[Durations, ...]
    backward: tuple[Durations, ...]
    micro: Seconds
    reduce: Seconds
    adam: float
    gather: Seconds
    hidden_micro: float
    hidden_step: float


def stage_times(
    job: Job, work: Work, choices: Choices | Wish, view: View
) -> tuple[StageTimes, ...]:
    """What every stage takes for its parts."""
    return tuple(_times(job, work, stage, choices, view) for stage in work.stages)


def _times(job: Job, work: Work, stage: Stage, choices: Choices | Wish, view: View) -> StageTimes:
    def passes(ahead: bool) -> tuple[Durations, ...]:
        found = []
        for one in stage.forward if ahead else stage.backward:
            inner = seconds(job, one.items, choices, view)
            sent = seconds(job, one.sent, choices, view)
            compute = view.of(one.compute)
            found.append(Durations(compute + inner.both + sent.coding, sent.link, compute))
        return tuple(found)

    forward, backward = passes(True), passes(False)
    compute = sum(one.compute for one in (*forward, *backward))
    overlap = job.calibration.overlap * compute
    return StageTimes(
        forward, backward, seconds(job, stage.micro, choices, view),
        seconds(job, stage.reduce, choices, view), view.of(stage.adam),
        seconds(job, stage.gather, choices, view), hidden_micro=overlap,
        hidden_step=overlap * work.layout.accumulation,
    )  # fmt: skip


class Name(NamedTuple):
    """What a task is: "forward", "backward", "send", "reduce", "code", "adam" or "gather"."""

    what: str
    stage: int
    chunk: int = 0
    micro_batch: int = 0


class _Builder:
    """Makes the tasks of a step. Their numbers do not depend on seconds, so that steps of the same
    layout can be compared task by task.
    """

    def __init__(self, work: Work, times: tuple[StageTimes, ...], micro_batches: int) -> None:
        self.layout, self.times = work.layout, times
        self.tasks: dict[int, Task] = {}
        self.names: dict[int, Name] = {}
        self._orders = [
            order(stage, self.layout.stages, self.layout.virtual, micro_batches)
            for stage in range(self.layout.stages)
        ]
        passes = [(stage, op) for stage, ops in enumerate(self._orders) for op in ops]
        #: the task that says that a pass has been made and sent
        self._sent = {key: 2 * index + 1 for index, key in enumerate(passes)}
        self._fresh = 2 * len(passes)

    def build(self) -> None:
        """Make all tasks."""
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
        """One pass, what it sends, and the reductions behind it; returns what comes before more."""
        own, sent = self.times[stage], self._sent[stage, op]
        device, link = f"stage {stage}", f"link {stage}"
        took = (own.backward if op.backward else own.forward)[op.chunk]
        what = "backward" if op.backward else "forward"
        place = (stage, op.chunk, op.micro_batch)
        reduced = [own.micro] if op.backward and op.chunk == 0 else []
        hidden = own.hidden_micro if reduced else 0.0
        if last:
            reduced.append(own.reduce)
            hidden = own.hidden_step
        wire = sum(one.link for one in reduced)
        behind = min(hidden, took.compute, wire)
        begun = self._put(sent - 1, Name(what, *place), device, took.busy - behind,
                          (*before, *self._source(stage, op)))  # fmt: skip
        if not reduced:
            return (self._put(sent, Name("send", *place), link, took.sent, (begun,)),)
        rest = self._put(None, Name(what, *place), device, behind, (begun,))
        gone = self._put(None, Name("reduce", *place), link, wire, (begun,))
        self._put(sent, Name("send", *place), link, took.sent, (rest,))
        coding = sum(one.coding for one in reduced)
        coded = self._put(None, Name("code", *place), device, coding, (rest, gone, sent))
        return (coded,)

    def _source(self, stage: int, op: Op) -> tuple[int, ...]:
        """The pass of a neighbour that this one needs."""
        stages, virtual = self.layout.stages, self.layout.virtual
        step, chunk = (1, op.chunk + 1) if op.backward else (-1, op.chunk - 1)
        if 0 <= stage + step < stages:
            return (self._sent[stage + step, op],)
        if 0 <= chunk < virtual:
            other = 0 if op.backward else stages - 1
            return (self._sent[other, op._replace(chunk=chunk)],)
        return ()

    def _end(self, stage: int, before: tuple[int, ...]) -> None:
        """The optimizer and the gather of its parameters."""
        own = self.times[stage]
        step = self._put(None, Name("adam", stage), f"stage {stage}", own.adam, before)
        gone = self._put(None, Name("gather", stage), f"link {stage}", own.gather.link, (step,))
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
    """The tasks of a step of ``micro_batches``, and their names."""
    builder = _Builder(work, times, micro_batches)
    builder.build()
    return builder.tasks, builder.names


def simulated(job: Job, work: Work, choices: Choices | Wish, view: View = View()) -> Step:
    """The step as ``view`` looks at it."""
    times = stage_times(job, work, choices, view)
    layout = work.layout
    count, stages = layout.accumulation, layout.stages
    some = 3 * stages + 2 * stages * layout.virtual
    if 2 * count * stages * layout.virtual <= MOST_PASSES or count <= some + stages:
        tasks, names = tasks_of(work, times, count)
        timeline = simulate(tasks)
        return Step(timeline.seconds, timeline, names)
    # 1F1B is steady in between: every ``stages`` micro-batches more take the same time
    some += (count - some) % stages
    whole = simulate(tasks_of(work, times, some + stages)[0]).seconds
    tasks, names = tasks_of(work, times, some)
    timeline = simulate(tasks)
    more = (whole - timeline.seconds) * (count - some) / stages
    return Step(timeline.seconds + more, timeline, names)


def least_seconds(work: Work, times: tuple[StageTimes, ...]) -> float:
    """No step with these times is faster: the way to a stage, what it does, and the way back."""
    best = there = back = 0.0
    count = work.layout.accumulation
    ends = [_end_seconds(own) for own in times]
    for own, end in zip(times, ends, strict=True):
        steady = sum(one.busy + one.sent for one in (*own.forward, *own.backward))
        behind = own.backward[0].compute
        left = max(0.0, own.micro.link - min(own.hidden_micro, behind))
        steady = count * (steady + own.micro.coding) + (count - 1) * left
        last = max(0.0, own.micro.link + own.reduce.link - min(own.hidden_step, behind))
        best = max(best, there + steady + max(last + end, back + ends[0]))
        there += own.forward[0].busy + own.forward[0].sent
        back += own.backward[0].busy
    return best


def _end_seconds(own: StageTimes) -> float:
    """What a stage does behind its last pass and the reductions on the link."""
    return own.reduce.coding + own.adam + own.gather.both
