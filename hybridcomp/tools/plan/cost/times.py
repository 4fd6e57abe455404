"""Compute the seconds of every part of a stage, and a lower bound of the step from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hybridcomp.tools.plan.choices import Choices
from hybridcomp.tools.plan.cost.calls import EngineCall, Price
from hybridcomp.tools.plan.cost.job import PlannedJob
from hybridcomp.tools.plan.cost.schedule import Op, Task
from hybridcomp.tools.plan.cost.work import Ideal, Items, StageWork, Work, lands_behind, price
from hybridcomp.tools.plan.machines.estimates import Estimate

#: index into a ``Estimate``: its value, its low end, its high end
VALUE, LOW, HIGH = 0, 1, 2


class Seconds(NamedTuple):
    """Seconds of some messages: for which the device codes, and for which links transfer."""

    coding: float
    link: float

    @property
    def both(self) -> float:
        """Return the seconds of coding and link in series."""
        return self.coding + self.link


@dataclass(frozen=True)
class View:
    """Numbers of a step to use: ``pick`` indexes every figure, ``without`` drops dimensions."""

    pick: int = VALUE
    without: frozenset[str] = frozenset()

    def of(self, figure: Estimate) -> float:
        """Return the picked number of ``figure``."""
        return float(figure[self.pick])


VIEW = View()


def seconds(job: PlannedJob, items: Items, choices: Choices | Ideal, view: View) -> Seconds:
    """Add up the seconds of ``items``, without the dimensions that ``view`` drops."""
    coding = link = 0.0
    for item in items:
        if item.key[0] in view.without:
            continue
        found: Price = price(job, item, choices)
        coding += view.of(found.coding)
        link += view.of(found.wire) + view.of(found.inside)
    return Seconds(coding, link)


class Durations(NamedTuple):
    """Seconds of a chunk's pass, with the messages it waits for, and of the send that follows.

    busy: for which the pass occupies the device, waits and codecs included; the sender also counts
    the receiver's decode.
    compute: the part of ``busy`` that computes layers. returned: the part of ``sent`` until a
    blocking send returns (``blocking_pipeline``).
    """

    busy: float
    sent: float
    compute: float
    returned: float = 0.0


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one stage: passes by virtual stage, messages that follow, and the step's end.

    hidden_micro, hidden_step: compute that can hide messages of a micro-batch, or of the step.
    landed: copies of gradients to the host before the optimizer. uploaded: copies of parameters
    back. filed: optimizer states to the drive and back. reduces: whether messages follow every
    micro-batch. blocking: whether a message between stages blocks both stages
    (``blocking_pipeline``).
    """

    forward: tuple[Durations, ...]
    backward: tuple[Durations, ...]
    micro: Seconds
    reduce: Seconds
    adam: float
    gather: Seconds
    hidden_micro: float
    hidden_step: float
    reduces: bool
    blocking: bool = False
    landed: float = 0.0
    uploaded: float = 0.0
    filed: float = 0.0

    def took(self, op: Op) -> Durations:
        """Return the seconds of a pass."""
        return (self.backward if op.backward else self.forward)[op.chunk]

    @property
    def optimizer(self) -> float:
        """Return the seconds of the optimizer's step with the copies around it."""
        return self.landed + self.filed + self.adam + self.uploaded

    def end_tasks(self, stage: int, start: float) -> list[Task]:
        """Return the optimizer's step, the copies around it and the gather, from ``start`` on."""
        tasks: list[Task] = []
        for what, resource, seconds in (
            ("to_host", "bus", self.landed), ("files", "drive", self.filed),
            ("adam", "stage", self.adam), ("to_device", "bus", self.uploaded),
            ("gather", "replicas", self.gather.link),
            ("code", "stage", self.gather.coding),
        ):  # fmt: skip
            end = start + seconds
            tasks.append(Task(what, stage, 0, 0, f"{resource} {stage}", start, end))
            start = end
        return tasks

    def behind(self, took: Durations, ends: bool, last: bool) -> tuple[list[Seconds], float, float]:
        """Return the reductions that follow a pass, their link seconds, and how many it hides.

        ends: whether the pass ends a micro-batch's backward. last: whether it is the step's last
        pass.
        """
        reduced = [self.micro] if ends and self.reduces else []
        hidden = self.hidden_micro
        if last:
            reduced.append(self.reduce)
            hidden = self.hidden_step
        wire = sum(one.link for one in reduced)
        return reduced, wire, min(hidden, took.compute, wire)


def stage_times(
    job: PlannedJob, work: Work, choices: Choices | Ideal, view: View = VIEW
) -> tuple[StageTimes, ...]:
    """Return the seconds of the parts of every stage."""
    return tuple(_times(job, work, stage, choices, view) for stage in work.stages)


def _times(
    job: PlannedJob, work: Work, stage: StageWork, choices: Choices | Ideal, view: View
) -> StageTimes:
    host = job.host(work.layout, stage.rank, choices if isinstance(choices, Choices) else None)
    values = stage.dense + stage.experts

    def passes(ahead: bool) -> tuple[Durations, ...]:
        found = []
        for one in stage.forward if ahead else stage.backward:
            inner = seconds(job, one.items, choices, view)
            sent = seconds(job, one.sent, choices, view)
            compute = view.of(one.compute)
            busy = compute + inner.both + sent.coding
            if not ahead and one is stage.backward[0]:
                busy += host.micro.at(values)
            returned = sent.link * _returned(job, one.sent, choices)
            found.append(Durations(busy, sent.link, compute, returned))
        return tuple(found)

    forward, backward = passes(True), passes(False)
    landed, uploaded, filed = (
        _copied(job, stage, way, choices, view, backward[0].compute)
        for way in ("backward", "forward", "states")
    )
    compute = sum(one.compute for one in (*forward, *backward))
    overlap = host.overlap * compute
    return StageTimes(
        forward, backward, seconds(job, stage.micro, choices, view),
        seconds(job, stage.reduce, choices, view), view.of(stage.adam) + host.step.at(values),
        seconds(job, stage.gather, choices, view), hidden_micro=overlap,
        hidden_step=overlap * work.layout.passes, reduces=bool(stage.micro),
        blocking=job.has_blocking_pipeline(work.layout) and not stage.micro,
        landed=landed, uploaded=uploaded, filed=filed,
    )  # fmt: skip


def _copied(
    job: PlannedJob, stage: StageWork, way: str, choices: Choices | Ideal, view: View,
    compute: float,
) -> float:  # fmt: skip
    """Return seconds of copies, or of files, that the last pass's ``compute`` cannot hide."""
    total = 0.0
    for item in stage.copies:
        if item.key[1] != way:
            continue
        found = seconds(job, (item,), choices, view)
        total += found.both - (min(found.link, compute) if lands_behind(job, item, choices) else 0)
    return total


def _returned(job: PlannedJob, sent: Items, choices: Choices | Ideal) -> float:
    """Return the fraction of a message's seconds after which its blocking send returns."""
    shares = [
        job.cluster.returned(price(job, item, choices).nbytes / item.count, item.call.nodes)
        for item in sent if isinstance(item.call, EngineCall) and item.call.operation == "send"
    ]  # fmt: skip
    return max(shares, default=1.0)


def are_blocking(times: tuple[StageTimes, ...]) -> bool:
    """Return whether messages between pipeline stages block both sender and receiver."""
    return all(own.blocking for own in times)


def least_seconds(work: Work, times: tuple[StageTimes, ...]) -> float:
    """Return a lower bound of a step: a stage's first input, its passes, its last gradient."""
    if are_blocking(times):
        return _least_blocking(work.layout.passes, times)
    best = there = back = 0.0
    count = work.layout.passes
    ends = [_end_seconds(own) for own in times]
    for own, end in zip(times, ends, strict=True):
        first = own.backward[0]
        rest = sum(one.busy + one.sent for one in (*own.forward, *own.backward)) - first.sent
        if work.layout.slices:  # sends overlap with the next pass
            busy = count * sum(one.busy for one in (*own.forward, *own.backward))
            best = max(best, there + busy + max(end, back + ends[0]))
            there, back = there + own.forward[0].busy + own.forward[0].sent, back + first.busy
            continue
        # messages to a neighbour and to replicas overlap
        left = max(0.0, own.micro.link - min(own.hidden_micro, first.compute))
        steady = count * rest + (count - 1) * (max(first.sent, left) + own.micro.coding)
        last = own.micro.link + own.reduce.link
        last = max(first.sent, last - min(own.hidden_step, first.compute, last))
        best = max(best, there + steady + max(last + end, first.sent + back + ends[0]))
        there += own.forward[0].busy + own.forward[0].sent
        back += first.busy
    return best


def _end_seconds(own: StageTimes) -> float:
    """Return a stage's seconds after its last pass and the link time of its reductions."""
    return own.micro.coding + own.reduce.coding + own.optimizer + own.gather.both


def _least_blocking(count: int, times: tuple[StageTimes, ...]) -> float:
    """Return a lower bound for blocking messages: a receive takes as long as its transfer."""
    best = there = back = into = 0.0
    ends = [max(0.0, own.reduce.link - own.hidden_step) + _end_seconds(own) for own in times]
    for stage, own in enumerate(times):
        ahead, behind = own.forward[0], own.backward[0]
        received = into
        if stage + 1 < len(times):
            received += times[stage + 1].backward[0].sent
        if stage:
            back += behind.sent + times[stage - 1].backward[0].busy
        steady = count * (ahead.busy + behind.busy + received)
        best = max(best, there + steady + max(ends[stage], back + ends[0]))
        there += into + ahead.busy
        into = ahead.sent
    return best
