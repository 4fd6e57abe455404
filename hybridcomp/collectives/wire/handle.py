"""Run the steps of a collective: handles that drive them, and meters of bytes and seconds.

A collective such as all_reduce has local work between and after its messages. It is written as a
generator that yields the works to wait for, so its numbered steps are in one body. On creation a
handle runs the generator up to the first message; ``wait()`` runs the rest. The rounds of a long
message run concurrently (``overlapped``), so that coding one round overlaps with sending others.

On a CPU seconds are host time, on a GPU device time (``device_clock``).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, cast

from torch import Tensor
from torch.distributed import Work

from hybridcomp.job import gates, peer_liveness

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
#: the steps of a collective: yields the works to wait for, returns the result
Steps = Generator[Work, None, T]
#: kinds of timed work: encoding and decoding, or waiting for the wire
Kind = Literal["codec", "wait"]


class Clock(Protocol):
    """Clock that measures the seconds of a collective."""

    on_device: bool

    @property
    def timed(self) -> Any:
        """Return the ``DeviceClock`` if the step is timed, else None."""
        ...

    def begin(self) -> Any:
        """Return a mark of the moment at which coding begins, for ``end``."""
        ...

    def begin_wait(self) -> Any:
        """Return a mark of the moment at which waiting begins, for ``end``."""
        ...

    def end(self, meter: Meter, kind: Kind, start: Any) -> None:
        """Add the time since the mark ``start`` to ``meter``."""
        ...


class TimedBody:
    """Context that adds its body's time to a meter; not a generator, which takes 1 us more."""

    __slots__ = ("_kind", "_meter", "_start")

    def __init__(self, meter: Meter, kind: Kind) -> None:
        self._meter, self._kind = meter, kind

    def __enter__(self) -> None:
        clock = self._meter.clock
        self._start = clock.begin() if self._kind == "codec" else clock.begin_wait()

    def __exit__(self, *_: object) -> None:
        self._meter.clock.end(self._meter, self._kind, self._start)


class HostClock:
    """Clock of host seconds, added when the body ends."""

    on_device, timed = False, None
    begin = begin_wait = staticmethod(time.perf_counter)

    def end(self, meter: Meter, kind: Kind, start: float) -> None:
        """Add the host's time since ``start`` to ``meter``."""
        seconds = time.perf_counter() - start
        if kind == "codec":
            meter.codec_s += seconds
        else:
            meter.wait_s += seconds


HOST = HostClock()


class _UnderWay(Work):
    """Work that completes immediately."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return immediately."""
        return True


#: yielded by steps that have posted a message but still have work to do before waiting, so that
#: other collectives in ``overlapped`` post their messages before this work
UNDER_WAY = _UnderWay()


@dataclass(frozen=True)
class StreamSpan:
    """Part of a stream's work between two events."""

    kind: Kind
    start: Any
    stop: Any


@dataclass(slots=True)
class Meter:
    """Mutable counters of one collective call on this rank.

    ``wire_nbytes`` counts the bytes that this rank sends to *other* ranks, payload padding, headers
    and size messages included, so that it can be compared with the counters of the network card.
    Parts that a rank "sends" to itself never count. all_gather counts ``(world_size - 1) *
    payload``: the ring that gloo and NCCL use sends each payload that often. ``transport`` does the
    counting, message by message.
    """

    messages: int = 0  # calls into torch.distributed
    wire_nbytes: int = 0
    codec_s: float = 0.0  # host seconds of encoding and decoding on the host
    wait_s: float = 0.0  # host seconds spent blocked in torch.distributed
    inter_nbytes: int = 0  # part of wire_nbytes that goes to ranks on other nodes
    used: dict[str, None] = field(default_factory=dict)  # specs of the used codecs, in order
    clock: Clock = HOST
    where: str = ""  # name of the message in errors
    spans: list[StreamSpan] = field(default_factory=list)  # timed spans of a GPU, in a timed step

    def sent(self, nbytes: int, inter_nbytes: int = 0) -> None:
        """Count one message to other ranks; ``inter_nbytes``: the part that goes to other nodes."""
        self.messages += 1
        self.wire_nbytes += nbytes
        self.inter_nbytes += inter_nbytes

    def coding(self) -> TimedBody:
        """Return a context whose body encodes or decodes: its time counts as the codec's."""
        return TimedBody(self, "codec")

    def waiting(self) -> TimedBody:
        """Return a context whose body waits for the wire; on NCCL only the stream waits."""
        return TimedBody(self, "wait")


class Pending(Generic[T]):
    """Collective under way; the constructor posts its first message."""

    def __init__(self, steps: Steps[T], meter: Meter, async_op: bool) -> None:
        self._steps = steps
        self._meter = meter
        self._work: Work | None = None
        self._result: T | None = None
        self._completed = False
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._advance()
        if not async_op:
            self.wait()

    def wait(self) -> T:
        """Finish the collective, decoding included. Waiting again gives the same result.

        On NCCL this orders the current stream after the transfer and does not block the host.
        Raises the error of the collective, again on every call.
        """
        while not self._completed:
            if self._error is not None:
                raise self._error
            work, clock = self._work, self._meter.clock
            assert work is not None
            try:
                if work is not UNDER_WAY:
                    start = clock.begin_wait()
                    work.wait()
                    clock.end(self._meter, "wait", start)
            except BaseException as error:
                failure = self._failed(error)
                if failure is error:
                    raise
                raise failure from error
            self._advance()
        return cast(T, self._result)

    def rest(self) -> Steps[T]:
        """Perform ``wait()`` as steps of another collective, whose handle waits for them."""
        while not self._completed:
            assert self._work is not None
            yield self._work
            self._advance()
        return cast(T, self._result)

    def is_completed(self) -> bool:
        """Return whether ``wait()`` has finished; makes no progress itself."""
        return self._completed

    def then(self, callback: Callable[[], None]) -> Self:
        """Call ``callback`` once after completion, at once if it is complete; returns self.

        ``wait()`` raises its error, again on every call.
        """
        if self._completed:
            callback()
        else:
            self._callbacks.append(callback)
        return self

    def _advance(self) -> None:
        """Run to the next message, or to the end and then the callbacks."""
        try:
            try:
                self._work = next(self._steps)
            except StopIteration as stop:
                self._work, self._result, self._completed = None, stop.value, True
            if self._completed:
                callbacks, self._callbacks = self._callbacks, []
                for callback in callbacks:  # may wait for further messages
                    callback()
        except BaseException as error:
            self._completed = False
            failure = self._failed(error)
            if failure is error:
                raise
            raise failure from error

    def _failed(self, error: BaseException) -> BaseException:
        """Keep and return the error that ``wait()`` raises from now on: PeerError if a rank is
        missing.

        If a rank has reported its failure (``together``), its report is raised without a search
        for missing ranks.
        """
        told = any(one.told_before(error) for one in gates.here.operations)
        self._error = (None if told else peer_liveness.lost(error, self._meter.where)) or error
        return self._error


class Handle(Pending[None]):
    """Handle of ``all_reduce``, ``all_gather`` and ``all_to_all``."""


class ReduceScatterHandle(Pending[Tensor]):
    """Handle of ``reduce_scatter``; ``wait()`` returns the sum."""


def overlapped(rounds: Sequence[Steps[T]]) -> Steps[T]:
    """Run collectives concurrently: start all, then continue each in turn after its message.

    The order depends only on the number of steps of each collective, so all ranks post the same
    messages in the same order. A handle posts the first message of every collective on creation. A
    single collective is returned unchanged, since another generator would cost time at each step.
    """
    return rounds[0] if len(rounds) == 1 else _side_by_side(rounds)


def _side_by_side(rounds: Sequence[Steps[T]]) -> Steps[T]:
    """Run several collectives; return the result of the last to finish."""
    waiting: deque[tuple[Steps[T], Work]] = deque()
    result: T | None = None

    def advance(steps: Steps[T]) -> None:
        nonlocal result
        try:
            waiting.append((steps, next(steps)))
        except StopIteration as stop:
            result = stop.value

    for steps in rounds:
        advance(steps)
    while waiting:
        steps, work = waiting.popleft()
        yield work
        advance(steps)
    return cast(T, result)
