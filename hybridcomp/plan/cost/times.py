"""Seconds of every part of a stage, and the bound that follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hybridcomp.plan.choices import Choices
from hybridcomp.plan.cost.job import Job
from hybridcomp.plan.cost.prices import Call, Price
from hybridcomp.plan.cost.work import Items, Stage, Wish, Work, lands_behind, price
from hybridcomp.plan.machines.figures import Figure

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


VIEW = View()


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
    returned: of ``sent``, until a stage goes on that meets its neighbour for it (``meetings``).
    """

    busy: float
    sent: float
    compute: float
    returned: float = 0.0


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one stage: passes by virtual stage, what follows each of them, and the end.

    hidden_micro, hidden_step: compute behind which messages of a micro-batch, or of the step, hide.
    landed, uploaded: copies to the host before the optimizer, and of parameters back.
    reduces: whether something travels behind every micro-batch. meets: whether stages meet for the
    messages between them (``meetings``).
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
    meets: bool = False
    landed: float = 0.0
    uploaded: float = 0.0

    @property
    def optimizer(self) -> float:
        """The optimizer's step with the copies around it."""
        return self.landed + self.adam + self.uploaded

    def behind(self, took: Durations, ends: bool, last: bool) -> tuple[list[Seconds], float, float]:
        """Reductions behind a pass, their seconds on the wire, and how many of these hide in it.

        ends: it is the end of a micro-batch's backward. last: it is the end of the step's.
        """
        reduced = [self.micro] if ends and self.reduces else []
        hidden = self.hidden_micro
        if last:
            reduced.append(self.reduce)
            hidden = self.hidden_step
        wire = sum(one.link for one in reduced)
        return reduced, wire, min(hidden, took.compute, wire)


def stage_times(
    job: Job, work: Work, choices: Choices | Wish, view: View = VIEW
) -> tuple[StageTimes, ...]:
    """What every stage takes for its parts."""
    return tuple(_times(job, work, stage, choices, view) for stage in work.stages)


def _times(job: Job, work: Work, stage: Stage, choices: Choices | Wish, view: View) -> StageTimes:
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
    landed, uploaded = (
        _copied(job, stage, way, choices, view, backward[0].compute)
        for way in ("backward", "forward")
    )
    compute = sum(one.compute for one in (*forward, *backward))
    overlap = host.overlap * compute
    return StageTimes(
        forward, backward, seconds(job, stage.micro, choices, view),
        seconds(job, stage.reduce, choices, view), view.of(stage.adam) + host.step.at(values),
        seconds(job, stage.gather, choices, view), hidden_micro=overlap,
        hidden_step=overlap * work.layout.passes, reduces=bool(stage.micro),
        meets=job.meets(work.layout) and not stage.micro, landed=landed, uploaded=uploaded,
    )  # fmt: skip


def _copied(
    job: Job, stage: Stage, way: str, choices: Choices | Wish, view: View, compute: float
) -> float:
    """Seconds of copies between device and host that ``compute`` of the last pass does not hide."""
    total = 0.0
    for item in stage.copies:
        if item.key[1] != way:
            continue
        found = seconds(job, (item,), choices, view)
        total += found.both - (min(found.link, compute) if lands_behind(job, item, choices) else 0)
    return total


def _returned(job: Job, sent: Items, choices: Choices | Wish) -> float:
    """Of the seconds of a message to a neighbour, the share until its sender goes on."""
    shares = [
        job.cluster.returned(price(job, item, choices).nbytes / item.count, item.call.nodes)
        for item in sent if isinstance(item.call, Call) and item.call.operation == "send"
    ]  # fmt: skip
    return max(shares, default=1.0)


def meet(times: tuple[StageTimes, ...]) -> bool:
    """Whether the stages of a pipeline meet for their messages."""
    return all(own.meets for own in times)


def least_seconds(work: Work, times: tuple[StageTimes, ...]) -> float:
    """No step with these times is faster: the way to a stage, what it does, and the way back."""
    if meet(times):
        return _least_meeting(work.layout.passes, times)
    best = there = back = 0.0
    count = work.layout.passes
    ends = [_end_seconds(own) for own in times]
    for own, end in zip(times, ends, strict=True):
        first = own.backward[0]
        rest = sum(one.busy + one.sent for one in (*own.forward, *own.backward)) - first.sent
        if work.layout.slices:  # they travel while the stage goes on
            busy = count * sum(one.busy for one in (*own.forward, *own.backward))
            best = max(best, there + busy + max(end, back + ends[0]))
            there, back = there + own.forward[0].busy + own.forward[0].sent, back + first.busy
            continue
        # what goes to a neighbour and what goes to replicas go at the same time
        left = max(0.0, own.micro.link - min(own.hidden_micro, first.compute))
        steady = count * rest + (count - 1) * (max(first.sent, left) + own.micro.coding)
        last = own.micro.link + own.reduce.link
        last = max(first.sent, last - min(own.hidden_step, first.compute, last))
        best = max(best, there + steady + max(last + end, first.sent + back + ends[0]))
        there += own.forward[0].busy + own.forward[0].sent
        back += first.busy
    return best


def _end_seconds(own: StageTimes) -> float:
    """What a stage does behind its last pass and the reductions on the link."""
    return own.micro.coding + own.reduce.coding + own.optimizer + own.gather.both


def _least_meeting(count: int, times: tuple[StageTimes, ...]) -> float:
    """The same where stages meet: a receive takes as long as the message travels."""
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
