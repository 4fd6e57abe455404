"""A step as a graph of events, slow and simple: the oracle of ``plan.cost.step``.

Every pass, send and reduction is an event that waits for others and takes seconds of a resource. A
resource runs one event at a time, in the order they become ready, ties by the smaller name, as in
FlexFlow's simulator (Jia et al. 2019).
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from hybridcomp.tools.plan.cost.blocking_pipeline import message_of, moves
from hybridcomp.tools.plan.cost.schedule import Op, order
from hybridcomp.tools.plan.cost.times import StageTimes, are_blocking
from hybridcomp.tools.plan.layout import Layout


class Event(NamedTuple):
    """Work that takes ``seconds`` of ``resource`` after all events of ``after``."""

    what: str
    resource: str
    seconds: float
    after: tuple[int, ...]


Events = dict[int, Event]


def simulate(events: Events) -> dict[int, tuple[float, float]]:
    """Return each event's start and end."""
    spans: dict[int, tuple[float, float]] = {}
    free: dict[str, float] = {}
    missing = {name: set(event.after) for name, event in events.items()}
    heap = [(0.0, name) for name, waits in missing.items() if not waits]
    heapq.heapify(heap)
    while heap:
        ready, name = heapq.heappop(heap)
        event = events[name]
        start = max(ready, free.get(event.resource, 0.0))
        spans[name] = start, start + event.seconds
        free[event.resource] = start + event.seconds
        for other, waits in missing.items():
            if name in waits:
                waits.remove(name)
                if not waits:
                    heapq.heappush(heap, (max(spans[one][1] for one in events[other].after), other))
    assert len(spans) == len(events), "events wait for each other in a circle"
    return spans


def step_spans(
    layout: Layout, times: tuple[StageTimes, ...], micro_batches: int
) -> list[tuple[str, str, float, float]]:
    """Return kind, resource, start and end of every event with a duration."""
    events = _blocking(layout, times, micro_batches) if are_blocking(times) else _Builder(
        layout, times, micro_batches).build()  # fmt: skip
    spans = simulate(events)
    return [(one.what, one.resource, *spans[name]) for name, one in events.items() if one.seconds]


class _Builder:
    """Builds the events of a step whose stages do not block each other."""

    def __init__(self, layout: Layout, times: tuple[StageTimes, ...], micro_batches: int) -> None:
        self.layout, self.times = layout, times
        self.copies = layout.offload
        self.events: Events = {}
        self._orders = [
            order(stage, layout.stages, layout.virtual, micro_batches, layout.slice_count)
            for stage in range(layout.stages)
        ]
        passes = [(stage, op) for stage, ops in enumerate(self._orders) for op in ops]
        #: last event of a pass including its send
        self._sent = {key: 2 * index + 1 for index, key in enumerate(passes)}
        self._fresh = 2 * len(passes)

    def build(self) -> Events:
        """Build all events."""
        for stage, ops in enumerate(self._orders):
            before: tuple[int, ...] = ()
            for op in ops:
                before = self._pass(stage, op, before, op is ops[-1])
            self._end(stage, before)
        return self.events

    def _put(self, number: int | None, what: str, resource: str, seconds: float,
             after: tuple[int, ...]) -> int:  # fmt: skip
        if number is None:
            number, self._fresh = self._fresh, self._fresh + 1
        self.events[number] = Event(what, resource, seconds, after)
        return number

    def _pass(self, stage: int, op: Op, before: tuple[int, ...], last: bool) -> tuple[int, ...]:
        """Add a pass, its send and its reductions; return the events that the next pass awaits."""
        own, sent = self.times[stage], self._sent[stage, op]
        device, link = f"stage {stage}", f"link {stage}"
        took = own.took(op)
        what = "backward" if op.backward else "forward"
        reduced, wire, behind = own.behind(took, op.backward and op.chunk == 0, last)
        begun = self._put(sent - 1, what, device, took.busy - behind,
                          (*before, *self._source(stage, op)))  # fmt: skip
        if not reduced:
            gone = self._put(sent, "send", link, took.sent, (begun,))
            return (begun if self.layout.slices else gone,)  # slices are posted
        rest = self._put(None, what, device, behind, (begun,))
        gone = self._put(None, "reduce", f"replicas {stage}", wire, (begun,))
        self._put(sent, "send", link, took.sent, (rest,))
        coding = sum(one.coding for one in reduced)
        coded = self._put(None, "code", device, coding, (rest, gone, sent))
        return (coded,)

    def _source(self, stage: int, op: Op) -> tuple[int, ...]:
        """Return the event that sends a pass's input; empty for the first chunk's input."""
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
            before = (self._put(None, "to_host", bus, own.landed, before),)
        step = self._put(None, "adam", f"stage {stage}", own.adam, before)
        if self.copies:
            step = self._put(None, "to_device", bus, own.uploaded, (step,))
        gone = self._put(None, "gather", f"replicas {stage}", own.gather.link, (step,))
        self._put(None, "code", f"stage {stage}", own.gather.coding, (gone,))


def _blocking(layout: Layout, times: tuple[StageTimes, ...], micro_batches: int) -> Events:
    """Return the events of a step of DeepSpeed's pipeline.

    A message is two events that begin together: the transfer on the link, and the part of it that
    its sender waits for.
    """
    stages = layout.stages
    rows = [moves(stage, stages, micro_batches) for stage in range(stages)]
    numbers: dict[tuple[str, int, Op], int] = {}
    for stage, row in enumerate(rows):
        for move in row:
            for what in ("send", "wait") if move.what == "send" else (move.what,):
                if what != "receive":
                    numbers[what, stage, move.pass_] = len(numbers)
    # the stage's events that a pass, or an end of a message, waits for
    before: dict[tuple[str, int, Op], tuple[int, ...]] = {}
    last: list[tuple[int, ...]] = []
    for stage, row in enumerate(rows):
        now: tuple[int, ...] = ()
        for move in row:
            before[move.what, stage, move.pass_] = now
            if move.what == "receive":
                now = (numbers["send", message_of(move, stage).sender, move.pass_],)
            else:
                what = "wait" if move.what == "send" else "pass"
                now = (numbers[what, stage, move.pass_],)
        last.append(now)
    events: Events = {}
    for (what, stage, pass_), number in numbers.items():
        took = times[stage].took(pass_)
        way = "backward" if pass_.backward else "forward"
        if what == "pass":
            after = before["pass", stage, pass_]
            events[number] = Event(way, f"stage {stage}", took.busy, after)
            continue
        other = stage - 1 if pass_.backward else stage + 1
        after = tuple(dict.fromkeys(
            (*before["send", stage, pass_], *before["receive", other, pass_])
        ))  # fmt: skip
        resource = f"link {stage} {way}" if what == "send" else f"sending {stage}"
        seconds = took.sent if what == "send" else took.returned
        events[number] = Event(what, resource, seconds, after)
    for stage, own in enumerate(times):
        _put_end(events, stage, own, last[stage])
    return events


def _put_end(events: Events, stage: int, own: StageTimes, after: tuple[int, ...]) -> None:
    """Add reduction, optimizer and gather, in series, to ``events``."""
    _, wire, hidden = own.behind(own.backward[0], False, True)
    for what, resource, seconds in (
        ("reduce", "replicas", wire - hidden), ("code", "stage", own.reduce.coding),
        ("adam", "stage", own.optimizer), ("gather", "replicas", own.gather.link),
        ("code", "stage", own.gather.coding),
    ):  # fmt: skip
        number = len(events)
        events[number], after = Event(what, f"{resource} {stage}", seconds, after), (number,)
