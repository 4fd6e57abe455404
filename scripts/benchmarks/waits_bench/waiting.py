"""Find the longest waits: who waited for what, in which message, and the overlap with compute."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.waits_bench.intervals import Stretch, length, within
from benchmarks.waits_bench.lanes import COMPUTATION, Inside, Lanes, blocking, role
from benchmarks.waits_bench.traces import DeviceSpan, HostSpan, RankTrace
from hybridcomp.collectives.wire.profiler_ranges import PREFIX

#: ranges that carry a message's number
NUMBERED = ("message", "codec", "post", "wait")


@dataclass(frozen=True)
class Waited:
    """One wait, in nanoseconds.

    Attributes:
        who: the stream and its main lane, or the host.
        what: the work behind which the event was recorded, or the blocking call.
        message: the message that requested the wait, or torch's operation.
        exposed: time of the wait without computation on the rank.
    """

    start: int
    stop: int
    who: str
    what: str
    message: str
    exposed: int


def waits_of(lanes: Lanes, steps: Sequence[Stretch]) -> list[Waited]:
    """Return a rank's waits in ``steps``, the most exposed first."""
    names = Names(lanes.trace)
    queues = _queues(lanes)
    found = [*_of_streams(lanes, names, queues), *_of_the_host(lanes, names, queues)]
    inside = [w for w in found if any(s <= w.start and w.stop <= e for s, e in steps)]
    return sorted(inside, key=lambda wait: (-wait.exposed, wait.start - wait.stop))


class Names:
    """Maps a moment of a thread to its message, else to the operation or annotation."""

    def __init__(self, trace: RankTrace) -> None:
        marks = [s for s in trace.host if s.name.startswith(PREFIX)]
        self._sent = Inside(s for s in marks if s.name.startswith(f"{PREFIX}send"))
        self._marks = Inside(s for s in marks if s.name.split()[0][len(PREFIX) :] in NUMBERED)
        self._ops = Inside(
            s for s in trace.host
            if s.category in ("cpu_op", "user_annotation") and not s.name.startswith(PREFIX)
        )  # fmt: skip
        self._messages = {
            mark.name.split()[1]: self._told(mark) for mark in trace.marks("message")
        }  # fmt: skip

    def _told(self, mark: HostSpan) -> str:
        """Describe a message by its collective, else by its meter's description."""
        sent = self._sent.at(mark.thread, mark.start)
        if sent is not None:
            return sent.name.removeprefix(f"{PREFIX}send ")
        return " ".join(mark.name.split()[2:])

    def at(self, thread: int, moment: int) -> str:
        """Return the host's message at ``moment``, else its operation, else ""."""
        mark = self._marks.at(thread, moment)
        if mark is not None:
            number = mark.name.split()[1]
            return self._messages.get(number, f"message {number}")
        sent = self._sent.at(thread, moment)
        if sent is not None:
            return sent.name.removeprefix(f"{PREFIX}send ")
        op = self._ops.at(thread, moment)
        return "" if op is None else op.name


class _Queue:
    """A stream's work, in the order it was queued."""

    def __init__(self, spans: Sequence[DeviceSpan]) -> None:
        self.spans = sorted(
            (s for s in spans if s.launch is not None), key=lambda s: _queued_at(s)
        )  # fmt: skip
        self._at = [_queued_at(span) for span in self.spans]

    def before(self, moment: int) -> DeviceSpan | None:
        """Return the last work queued before ``moment``."""
        place = bisect_left(self._at, moment)
        return self.spans[place - 1] if place else None

    def after(self, moment: int) -> DeviceSpan | None:
        """Return the first work queued after ``moment``."""
        place = bisect_left(self._at, moment)
        return self.spans[place] if place < len(self.spans) else None


def _queued_at(span: DeviceSpan) -> int:
    assert span.launch is not None
    return span.launch.start


def _queues(lanes: Lanes) -> dict[int, _Queue]:
    """Return each stream's work."""
    by_stream: dict[int, list[DeviceSpan]] = {}
    for span in lanes.trace.device:
        by_stream.setdefault(span.stream, []).append(span)
    return {stream: _Queue(spans) for stream, spans in by_stream.items()}


def _of_streams(lanes: Lanes, names: Names, queues: dict[int, _Queue]) -> Iterator[Waited]:
    """Yield the waits of streams.

    A wait begins when the preceding work is done and the following work is queued, and ends when
    the work behind which the event was recorded is done.
    """
    nothing, roles = _Queue([]), {stream: role(lanes, stream) for stream in queues}
    for wait in lanes.trace.waits:
        own = nothing if wait.stream is None else queues.get(wait.stream, nothing)
        other = queues.get(wait.awaited, nothing)
        behind, awaited = own.after(wait.call.start), other.before(wait.record.start)
        if behind is None or awaited is None or behind.launch is None:
            continue
        before = own.before(wait.call.start)
        start = max(behind.launch.start, 0 if before is None else before.stop)
        stop = min(awaited.stop, behind.start)
        if stop > start:
            who = f"stream {wait.stream} ({roles[behind.stream]})"
            message = names.at(wait.call.thread, wait.call.start)
            exposed = _exposed(lanes, (start, stop))
            yield Waited(start, stop, who, _behind(lanes, awaited), message, exposed)


def _behind(lanes: Lanes, awaited: DeviceSpan) -> str:
    """Name the work behind which an event was recorded."""
    return f"stream {awaited.stream}, {lanes.of[awaited]}: {short(awaited.name)}"


def _of_the_host(lanes: Lanes, names: Names, queues: dict[int, _Queue]) -> Iterator[Waited]:
    """Yield blocking calls, and on a CPU the marked waits."""
    spans = blocking(lanes.trace) if lanes.of else list(lanes.trace.marks("wait"))
    for span in spans:
        what = span.name if lanes.of else "the message"
        event = lanes.trace.synced.get(span)
        if event is not None and event.awaited in queues:
            awaited = queues[event.awaited].before(event.record.start)
            what += "" if awaited is None else f": {_behind(lanes, awaited)}"
        time = span.start, span.stop
        yield Waited(
            *time, "the host", what, names.at(span.thread, span.start), _exposed(lanes, time)
        )


def _exposed(lanes: Lanes, time: Stretch) -> int:
    return time[1] - time[0] - length(within(lanes.times[COMPUTATION], time))


def short(name: str) -> str:
    """Return a kernel's name without arguments and namespaces, at most 48 characters."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return name.partition("(")[0].partition("<")[0].rpartition("::")[2][:48]
