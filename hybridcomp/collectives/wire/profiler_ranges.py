"""Mark each message's encoding, sending and waiting in a trace of ``torch.profiler``.

While the profiler records, a channel's messages open these spans (``record_function``) on the host,
which locate kernels, events and waits in the trace:

    hybridcomp::send dp forward 1048576 bfloat16 blockint(bits=4)   a message, until it is posted
    hybridcomp::message 7 dp at step 3      number of the message in the marks below
    hybridcomp::codec 7                     the host encodes, sums or decodes, or launches that
    hybridcomp::post 7 262144               bytes for other ranks go to torch.distributed
    hybridcomp::wait 7                      the host, or a GPU's current stream, waits for bytes

Without a profiler a message only checks twice whether a profiler records.
"""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.profiler import record_function

from hybridcomp.collectives.wire.device_clock import DeviceClock
from hybridcomp.collectives.wire.handle import Clock, Kind, Meter

#: prefix of the names of all marks
PREFIX = "hybridcomp::"
_numbers = itertools.count(1)


def sending(
    dimension: str, direction: str, numel: int, dtype: torch.dtype, spec: str
) -> AbstractContextManager[Any]:
    """Return a context that marks its body as sending a message with codec ``spec``."""
    short = str(dtype).removeprefix("torch.")
    return record_function(f"{PREFIX}send {dimension} {direction} {numel} {short} {spec}")


class MarkedClock:
    """Clock of one message that wraps another clock and marks the spans that it measures."""

    def __init__(self, clock: Clock, number: int) -> None:
        self._clock, self._number = clock, number
        self.on_device = clock.on_device

    @property
    def timed(self) -> DeviceClock | None:
        """Return the wrapped clock if it is that of a GPU's timed step, else None."""
        found: DeviceClock | None = self._clock.timed
        return found

    def begin(self) -> Any:
        """Open a mark of coding; return it with the wrapped clock's mark, for ``end``."""
        return self._open("codec"), self._clock.begin()

    def begin_wait(self) -> Any:
        """Open a mark of waiting; return it with the wrapped clock's mark, for ``end``."""
        return self._open("wait"), self._clock.begin_wait()

    def end(self, meter: Meter, kind: Kind, start: Any) -> None:
        """Add the time since ``start`` to ``meter`` and close the mark."""
        mark, begun = start
        self._clock.end(meter, kind, begun)
        mark.__exit__(None, None, None)

    def _open(self, kind: Kind) -> record_function:
        mark = record_function(f"{PREFIX}{kind} {self._number}")
        mark.__enter__()  # type: ignore[no-untyped-call]
        return mark


class MarkedMeter(Meter):
    """Meter of a message in a recorded step; it marks the bytes that it counts as posted."""

    __slots__ = ("_number",)

    def __init__(self, clock: Clock, where: str) -> None:
        self._number = next(_numbers)
        super().__init__(clock=MarkedClock(clock, self._number), where=where)
        with record_function(f"{PREFIX}message {self._number} {where}"):
            pass

    def sent(self, nbytes: int, inter_nbytes: int = 0) -> None:
        """Count one message to other ranks and mark it."""
        with record_function(f"{PREFIX}post {self._number} {nbytes}"):
            super().sent(nbytes, inter_nbytes)
