"""A call of a collective: its steps, the handle that drives them, the meter of what they cost.

A collective such as all_reduce has local work between and after its messages. Written as a
generator that yields what it waits for it keeps its numbered steps in one body; a handle runs it
up to its first message when it is made and drives the rest in ``wait()``. Of a long message several
rounds run side by side (``overlapped``), so that coding one overlaps with the wire of the others.

Seconds are the host's on a CPU. On a GPU they are the device's (``device_clock``).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar, cast

from torch import Tensor
from torch.distributed import Work

from hybridcomp.job import peer_liveness

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
#: the steps of a collective: yields the works to wait for, returns the result
Steps = Generator[Work, None, T]
#: works that nobody waited for may be that many before somebody does
MOST_FORGOTTEN = 64
#: what is timed: encoding and decoding, or waiting for the wire
Kind = Literal["codec", "wait"]


class Timed(Protocol):
    """What collects the seconds of one collective."""

    codec_s: float
    wait_s: float
    spans: list[StreamSpan]


@dataclass(frozen=True)
class StreamSpan:
    """A stretch of a stream's work between two events."""

    kind: Kind
    start: Any
    stop: Any


class Clock(Protocol):
    """How the seconds of a collective are taken."""

    on_device: bool

    def time(self, timed: Timed, kind: Kind) -> AbstractContextManager[None]:
        """Times the ``with`` body for ``timed``."""
        ...


class _HostTime:
    """A ``with`` body whose host seconds are added up; not a generator, which takes 1 us more."""

    __slots__ = ("_kind", "_start", "_timed")

    def __init__(self, timed: Timed, kind: Kind) -> None:
        self._timed, self._kind = timed, kind

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._start
        if self._kind == "codec":
            self._timed.codec_s += seconds
        else:
            self._timed.wait_s += seconds


class HostClock:
    """Seconds of this process, at once."""

    on_device = False

    def time(self, timed: Timed, kind: Kind) -> AbstractContextManager[None]:
        """Adds the time of the ``with`` body to ``timed``."""
        return _HostTime(timed, kind)


HOST = HostClock()


class Works(Work):
    """Several works as one, and within one time limit; None: as long as each of them takes."""

    #: what nobody waited for. gloo takes a receive back when its work is freed, and the message
    #: that comes for it would be taken for the next one of its sender
    _forgotten: ClassVar[deque[list[Work]]] = deque()

    def __init__(self, works: Sequence[Work], limit: timedelta | None) -> None:
        super().__init__()
        self._works, self._limit = list(works), limit

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all of them; raises what the first that failed raises."""
        works, self._works = self._works, []
        limit = self._limit if timeout is None else timeout
        for work in works:  # a receive of gloo does not know when its group's time is over
            work.wait() if limit is None else work.wait(limit)
        return True

    def __del__(self) -> None:
        if self._works:
            self._forgotten.append(self._works)

    @classmethod
    def wait_for_forgotten(cls) -> None:
        """Wait for the oldest that nobody waited for: long there, as those of a pair come in order.

        The last ``MOST_FORGOTTEN`` stay, whose messages may still be on their way.
        """
        while len(cls._forgotten) > MOST_FORGOTTEN:
            for work in cls._forgotten.popleft():
                work.wait()


class _UnderWay(Work):
    """Nothing to wait for."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True


#: yielded by steps that have posted a message and have work to do before they wait for it: others
#: that run side by side post theirs first (``overlapped``)
UNDER_WAY = _UnderWay()


@dataclass(slots=True)
class Meter:
    """Mutable counters of one collective call on this rank.

    ``wire_nbytes`` counts what this rank sends to *other* ranks, payload padding, headers and
    size messages included, so that it can be held against the counters of the network card. What a
    rank "sends" to itself never counts. all_gather counts ``(world_size - 1) * payload``: the
    ring that gloo and NCCL use sends each payload that often. ``transport`` counts, message by
    message.
    """

    messages: int = 0  # calls into torch.distributed
    wire_nbytes: int = 0
    codec_s: float = 0.0  # seconds of the host in encode and decode, where that codes
    wait_s: float = 0.0  # seconds of the host blocked in torch.distributed
    inter_nbytes: int = 0  # of wire_nbytes, to ranks on other nodes
    used: dict[str, None] = field(default_factory=dict)  # specs of the codecs, in order
    clock: Clock = HOST
    where: str = ""  # which message, for an error about it
    spans: list[StreamSpan] = field(default_factory=list)  # of a GPU, in a step that is timed

    def sent(self, nbytes: int, inter_nbytes: int = 0) -> None:
        """Count one message to other ranks, of which some bytes go to other nodes."""
        self.messages += 1
        self.wire_nbytes += nbytes
        self.inter_nbytes += inter_nbytes

    def use(self, *specs: str) -> None:
        """Remember which codecs the values went through."""
        for spec in specs:
            self.used[spec] = None

    def coding(self) -> AbstractContextManager[None]:
        """The ``with`` body encodes or decodes: its time counts as the codec's."""
        return self.clock.time(self, "codec")

    def waiting(self) -> AbstractContextManager[None]:
        """The ``with`` body waits for the wire; on NCCL that is the stream, not the host."""
        return self.clock.time(self, "wait")


class Pending(Generic[T]):
    """A collective under way. Its first message is posted when this is constructed."""

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
        Raises what the collective raised, again on every call.
        """
        while not self._completed:
            if self._error is not None:
                raise self._error
            assert self._work is not None
            try:
                with self._meter.waiting():
                    self._work.wait()
            except BaseException as error:
                failure = self._failed(error)
                if failure is error:
                    raise
                raise failure from error
            self._advance()
        return cast(T, self._result)

    def rest(self) -> Steps[T]:
        """``wait()`` as the steps of another collective, which does the waiting."""
        while not self._completed:
            assert self._work is not None
            yield self._work
            self._advance()
        return cast(T, self._result)

    def is_completed(self) -> bool:
        """Whether ``wait()`` has run to its end. Asking makes no progress."""
        return self._completed

    def then(self, callback: Callable[[], None]) -> Self:
        """Call ``callback`` once after completion, now if that was before; returns self."""
        if self._completed:
            callback()
        else:
            self._callbacks.append(callback)
        return self

    def _advance(self) -> None:
        """Run to the next message or to the end."""
        try:
            self._work = next(self._steps)
        except StopIteration as stop:
            self._work, self._result, self._completed = None, stop.value, True
        except BaseException as error:
            failure = self._failed(error)
            if failure is error:
                raise
            raise failure from error
        if self._completed:
            callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                callback()

    def _failed(self, error: BaseException) -> BaseException:
        """What ``wait()`` raises from now on: who is missing, where ``error`` is about that."""
        self._error = peer_liveness.lost(error, self._meter.where) or error
        return self._error


class Handle(Pending[None]):
    """The handle of ``all_reduce``, ``all_gather`` and ``all_to_all``."""


class ReduceScatterHandle(Pending[Tensor]):
    """The handle of ``reduce_scatter``; ``wait()`` returns the sum."""


def given(result: T) -> Steps[T]:
    """The steps of a collective whose ``result`` is there without a message."""
    yield from ()
    return result


def transfer(post: Callable[[], Work], meter: Meter) -> None:
    """A collective that is one message and nothing else: ``post`` it, wait for it."""

    def steps() -> Steps[None]:
        yield post()

    Pending(steps(), meter, async_op=False)


def overlapped(messages: Iterable[Steps[None]]) -> Steps[None]:
    """Run collectives side by side: start all, then go on with each as its message arrives.

    The order depends on nothing but their number, so all ranks post the same messages in the same
    order. Started at once, all of a first hop is under way when a handle is returned.
    """
    waiting: deque[tuple[Steps[None], Work]] = deque()

    def advance(steps: Steps[None]) -> None:
        for work in steps:
            waiting.append((steps, work))
            return

    for steps in messages:
        advance(steps)
    while waiting:
        steps, work = waiting.popleft()
        yield work
        advance(steps)
