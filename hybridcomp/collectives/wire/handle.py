"""Run the steps of a collective: handles that drive them, and meters of bytes and seconds.

A collective such as all_reduce has local work between and after its messages. It is written as a
generator that yields the works to wait for, so its numbered steps are in one body; a handle runs it
up to its first message when it is made and runs the rest in ``wait()``. The rounds of a long
message run side by side (``overlapped``), so that coding one overlaps with sending the others.

Seconds are the host's on a CPU. On a GPU they are the device's (``device_clock``).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
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
#: largest number of abandoned works; older ones are waited for
MOST_FORGOTTEN = 64
#: kinds of timed work: encoding and decoding, or waiting for the wire
Kind = Literal["codec", "wait"]


class Timed(Protocol):
    """Collector of the seconds of one collective."""

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
    """Clock that measures the seconds of a collective."""

    on_device: bool

    def begin(self) -> Any:
        """Return a mark of this moment, for ``end``."""
        ...

    def end(self, timed: Timed, kind: Kind, start: Any) -> None:
        """Add the time since the mark ``start`` to ``timed``."""
        ...

    def time(self, timed: Timed, kind: Kind) -> AbstractContextManager[None]:
        """Return a context that adds the time of its body to ``timed``."""
        ...


class TimedBody:
    """Context that adds up its body's seconds; not a generator, which takes 1 us more."""

    __slots__ = ("_clock", "_kind", "_start", "_timed")

    def __init__(self, clock: Clock, timed: Timed, kind: Kind) -> None:
        self._clock, self._timed, self._kind = clock, timed, kind

    def __enter__(self) -> None:
        self._start = self._clock.begin()

    def __exit__(self, *_: object) -> None:
        self._clock.end(self._timed, self._kind, self._start)


class HostClock:
    """Clock of host seconds, added when the body ends."""

    on_device = False
    begin = staticmethod(time.perf_counter)

    def end(self, timed: Timed, kind: Kind, start: float) -> None:
        """Add the host's time since ``start`` to ``timed``."""
        seconds = time.perf_counter() - start
        if kind == "codec":
            timed.codec_s += seconds
        else:
            timed.wait_s += seconds

    def time(self, timed: Timed, kind: Kind) -> AbstractContextManager[None]:
        """Return a context that adds the host's time of its body to ``timed``."""
        return TimedBody(self, timed, kind)


HOST = HostClock()


class Works(Work):
    """Several works as one, with a time limit for each of them; None: the backend's."""

    #: works deleted without a wait. gloo cancels a receive when its work is freed, and the message
    #: would then be matched with the next receive from the same sender
    forgotten: ClassVar[deque[list[Work]]] = deque()

    def __init__(self, works: Sequence[Work], limit: timedelta | None) -> None:
        super().__init__()
        self._works, self._limit = list(works), limit

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all of them; raises the error of the first that failed."""
        works, self._works = self._works, []
        limit = self._limit if timeout is None else timeout
        for work in works:  # gloo does not apply the group's timeout to a receive by itself
            work.wait() if limit is None else work.wait(limit)
        return True

    def __del__(self) -> None:
        if self._works:
            self.forgotten.append(self._works)

    @classmethod
    def wait_for_forgotten(cls) -> None:
        """Wait for the oldest abandoned works, which are done, as pairs keep the order of messages.

        The last ``MOST_FORGOTTEN`` stay, whose messages may still be on their way.
        """
        while len(cls.forgotten) > MOST_FORGOTTEN:
            for work in cls.forgotten.popleft():
                work.wait()


class _UnderWay(Work):
    """Work that is done at once."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True


#: yielded by steps that have posted a message and have work to do before they wait for it, so that
#: collectives that run side by side post theirs first (``overlapped``)
UNDER_WAY = _UnderWay()


@dataclass(slots=True)
class Meter:
    """Mutable counters of one collective call on this rank.

    ``wire_nbytes`` counts the bytes that this rank sends to *other* ranks, payload padding, headers
    and size messages included, so that it can be compared with the counters of the network card.
    Parts that a rank "sends" to itself never count. all_gather counts ``(world_size - 1) *
    payload``: the ring that gloo and NCCL use sends each payload that often. ``transport`` counts,
    message by message.
    """

    messages: int = 0  # calls into torch.distributed
    wire_nbytes: int = 0
    codec_s: float = 0.0  # seconds of the host in encode and decode, where the host runs them
    wait_s: float = 0.0  # seconds of the host blocked in torch.distributed
    inter_nbytes: int = 0  # of wire_nbytes, to ranks on other nodes
    used: dict[str, None] = field(default_factory=dict)  # specs of the codecs, in order
    clock: Clock = HOST
    where: str = ""  # names the message in errors about it
    spans: list[StreamSpan] = field(default_factory=list)  # of a GPU, in a step that is timed

    def sent(self, nbytes: int, inter_nbytes: int = 0) -> None:
        """Count one message to other ranks; ``inter_nbytes``: the part that goes to other nodes."""
        self.messages += 1
        self.wire_nbytes += nbytes
        self.inter_nbytes += inter_nbytes

    def use(self, *specs: str) -> None:
        """Note the specs of the codecs that encoded the values."""
        for spec in specs:
            self.used[spec] = None

    def coding(self) -> AbstractContextManager[None]:
        """Return a context whose body encodes or decodes: its time counts as the codec's."""
        return self.clock.time(self, "codec")

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context whose body waits for the wire; on NCCL the stream waits, no host."""
        return self.clock.time(self, "wait")


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
                    start = clock.begin()
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
        """Do ``wait()`` as steps of another collective, whose handle waits for them."""
        while not self._completed:
            assert self._work is not None
            yield self._work
            self._advance()
        return cast(T, self._result)

    def is_completed(self) -> bool:
        """Return whether ``wait()`` has finished; makes no progress itself."""
        return self._completed

    def then(self, callback: Callable[[], None]) -> Self:
        """Call ``callback`` once after completion, at once if it is complete; returns self."""
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
        """Keep and return what ``wait()`` raises from now on: PeerError where a rank is missing."""
        self._error = peer_liveness.lost(error, self._meter.where) or error
        return self._error


class Handle(Pending[None]):
    """Handle of ``all_reduce``, ``all_gather`` and ``all_to_all``."""


class ReduceScatterHandle(Pending[Tensor]):
    """Handle of ``reduce_scatter``; ``wait()`` returns the sum."""
