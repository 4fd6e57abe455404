"""Whose time a collective's cost is: the host's on a CPU, the device's on a GPU.

What a host spends on a GPU's message is launching it. The device's time is read from pairs of
events around coding and around the stream's wait for the wire. Recording one takes a microsecond or
two and waits for nothing, but a step may have thousands, so only some steps are timed: a clock for
those, ``SILENT`` for the others. An event says how late it was once the device has passed it, which
nobody waits for before a report: ``drain`` reads what is through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from hybridcomp.collectives.wire.handle import Kind, StreamSpan, Timed

#: spans that may wait for the end of a step; an evaluation sends messages without end in one
WAITING = 1024


class Totals(Protocol):
    """What a device's seconds are added to in the end."""

    device_codec_s: float
    device_wait_s: float


class SilentClock:
    """Measures nothing: the steps of a GPU that are not timed."""

    on_device = True
    _nothing = nullcontext()

    def time(self, timed: Timed, kind: Kind) -> AbstractContextManager[None]:
        """Does nothing."""
        return self._nothing


SILENT = SilentClock()


class _DeviceTime:
    """A ``with`` body between two events on the stream that is current in it."""

    __slots__ = ("_clock", "_kind", "_start", "_timed")

    def __init__(self, clock: DeviceClock, timed: Timed, kind: Kind) -> None:
        self._clock, self._timed, self._kind = clock, timed, kind

    def __enter__(self) -> None:
        self._start = self._clock.marked()

    def __exit__(self, *_: object) -> None:
        self._timed.spans.append(StreamSpan(self._kind, self._start, self._clock.marked()))


def _cuda_event() -> Any:
    import torch

    cuda: Any = torch.cuda
    return cuda.Event(enable_timing=True)


@dataclass
class DeviceClock:
    """The timed steps of one GPU.

    Attributes:
        make: a new event, with what ``torch.cuda.Event`` has of record, query, synchronize and
            elapsed_time. Events are used again once they are read.
    """

    make: Callable[[], Any] = _cuda_event
    on_device: bool = True
    _free: list[Any] = field(default_factory=list)
    _landed: deque[tuple[Totals, StreamSpan]] = field(default_factory=deque)

    def time(self, timed: Timed, kind: Kind) -> AbstractContextManager[None]:
        """Puts the ``with`` body between two events, a span of ``timed``."""
        return _DeviceTime(self, timed, kind)

    def marked(self) -> Any:
        """An event behind what the current stream has to do so far."""
        event = self._free.pop() if self._free else self.make()
        event.record()
        return event

    def land(self, spans: list[StreamSpan], totals: Totals) -> None:
        """Add ``spans`` to ``totals`` once the device has passed them; empties ``spans``."""
        self._landed.extend((totals, span) for span in spans)
        spans.clear()
        if len(self._landed) > WAITING:
            self.drain()

    def drain(self, wait: bool = False) -> None:
        """Read the spans that the device has passed, in order; with ``wait`` all of them."""
        while self._landed:
            totals, span = self._landed[0]
            if wait:
                span.stop.synchronize()
            elif not span.stop.query():
                return
            seconds = span.start.elapsed_time(span.stop) / 1e3
            if span.kind == "codec":
                totals.device_codec_s += seconds
            else:
                totals.device_wait_s += seconds
            self._landed.popleft()
            self._free += (span.start, span.stop)
