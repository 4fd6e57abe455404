"""Measure the GPU time of a collective's coding and waiting.

Host time would only measure launches. GPU time is read from pairs of events around coding and
around the stream's wait for the wire. Recording an event takes one or two microseconds and waits
for nothing, but a step may record thousands. So only some steps are timed, by a ``DeviceClock``;
the other steps have ``SILENT``. Events can be read once the device has passed them: ``drain`` reads
the events that are ready, and only a report waits for the remaining ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from hybridcomp.collectives.wire.handle import Kind, Meter, StreamSpan

#: most spans kept until the end of a step; an evaluation can send any number of messages in a step
WAITING = 1024


class Totals(Protocol):
    """Totals to which device seconds are finally added."""

    device_codec_s: float
    device_wait_s: float


class SilentClock:
    """Clock that measures nothing, for steps of a GPU that are not timed."""

    on_device, timed = True, None

    def begin(self) -> None:
        """Mark nothing."""

    begin_wait = begin

    def end(self, meter: Meter, kind: Kind, start: None) -> None:
        """Measure nothing."""


SILENT = SilentClock()


def _cuda_event() -> Any:
    import torch

    cuda: Any = torch.cuda
    return cuda.Event(enable_timing=True)


@dataclass
class DeviceClock:
    """Clock for the timed steps of one GPU.

    Attributes:
        make: returns a new event with the methods record, query, synchronize and elapsed_time of
            ``torch.cuda.Event``. Events are reused once they are read.
    """

    make: Callable[[], Any] = _cuda_event
    on_device: bool = True
    _free: list[Any] = field(default_factory=list)
    _landed: deque[tuple[Totals, StreamSpan]] = field(default_factory=deque)

    @property
    def timed(self) -> DeviceClock:
        """Return this clock."""
        return self

    def end(self, meter: Meter, kind: Kind, start: Any) -> None:
        """Record a second event; the time between them becomes a span of ``meter``."""
        meter.spans.append(StreamSpan(kind, start, self.begin()))

    def begin(self) -> Any:
        """Record an event after all work queued on the current stream, and return the event."""
        event = self._free.pop() if self._free else self.make()
        event.record()
        return event

    begin_wait = begin

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
