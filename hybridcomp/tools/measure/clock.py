"""Time a call, alone or during matrix products, on a host and on a GPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from hybridcomp.tools.measure import throttle

Run = Callable[[], object]
cuda: Any = torch.cuda  # untyped in part
#: shorter calls are repeated inside one timing
SHORT_S = 5e-4
MOST_INNER = 20
#: fewest and most timings of a case; slow calls vary less and need fewer timings
LEAST, MOST = 3, 25
LEAST_LONG, LONG_S = 2, 0.25
#: a timing lasts this many periods if CPU time is limited by the period
PERIODS = 6


class CallClock(Protocol):
    """Times calls on one device. period_s: of the CPU time limit (``throttle``); 0.0: no limit."""

    period_s: float

    def seconds(self, run: Run, times: int = 1) -> float:
        """Return the mean seconds of ``times`` calls of ``run``, until the device is done."""
        ...

    def beside(
        self, run: Run, product: Run, product_s: float, expected_s: float
    ) -> tuple[float, float]:
        """Time ``run`` while ``product`` is computed repeatedly.

        Args:
            product_s: seconds of one product alone.
            expected_s: approximate seconds of ``run``.

        Returns its seconds, and the speed of the products meanwhile, relative to products alone.
        """
        ...

    def close(self) -> None:
        """End the clock's thread, without waiting for a running call."""
        ...


class HostCallClock:
    """Clock of a CPU: calls return when done; products run in this thread, calls in another."""

    period_s = 0.0

    def __init__(self) -> None:
        self.period_s = throttle.period_s()
        self._worker = ThreadPoolExecutor(1)

    def seconds(self, run: Run, times: int = 1) -> float:
        start = time.perf_counter()
        for _ in range(times):
            run()
        return (time.perf_counter() - start) / times

    def beside(
        self, run: Run, product: Run, product_s: float, expected_s: float
    ) -> tuple[float, float]:
        begin = time.perf_counter()
        future, done = self._worker.submit(self.seconds, run), 0
        while not future.done():
            product()
            done += 1
        elapsed = time.perf_counter() - begin
        return future.result(), min(1.0, done * product_s / elapsed)

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)


class DeviceCallClock:
    """Clock of a GPU, by events; calls during matrix products run on a stream of their own."""

    period_s = 0.0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = cuda.Stream(device)

    def seconds(self, run: Run, times: int = 1) -> float:
        start, stop = _event(), _event()
        cuda.synchronize(self._device)
        start.record()
        for _ in range(times):
            run()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e-3 / times

    def beside(
        self, run: Run, product: Run, product_s: float, expected_s: float
    ) -> tuple[float, float]:
        start, stop, computed = _event(), _event(), _event()
        cuda.synchronize(self._device)
        # enough products to last as long as the call, which the products slow down
        count = max(2, round(1.5 * expected_s / product_s))
        start.record()
        self._side.wait_event(start)
        with cuda.stream(self._side):
            run()
            stop.record()
        for _ in range(count):
            product()
        computed.record()
        cuda.synchronize(self._device)
        seconds = float(start.elapsed_time(stop)) * 1e-3
        busy = float(start.elapsed_time(computed)) * 1e-3
        # of products that outlast the call, only the extra time over products alone was lost
        overlap = min(seconds, busy)
        left = 1 - (busy - count * product_s) / overlap if overlap else 1.0
        return seconds, min(1.0, max(0.0, left))

    def close(self) -> None:
        """Do nothing: it has no thread."""


def _event() -> Any:
    return cuda.Event(enable_timing=True)


def clock_for(device: torch.device) -> CallClock:
    """Return the clock of a device."""
    return DeviceCallClock(device) if device.type == "cuda" else HostCallClock()


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which ``device`` is the current GPU; for a CPU it does nothing."""
    return cuda.device(device) if device.type == "cuda" else nullcontext()


def is_long(seconds: float) -> bool:
    """Return whether calls of ``seconds`` take so long that one is enough to warm up."""
    return seconds > LONG_S


def least_timings(seconds: float) -> int:
    """Return the fewest timings that a case with calls of ``seconds`` needs."""
    return LEAST_LONG if is_long(seconds) else LEAST


def least_calls(seconds: float) -> int:
    """Return the fewest calls of a case with calls of ``seconds``: warm-up and timings."""
    return (1 if is_long(seconds) else 2) + least_timings(seconds)


def samples(clock: CallClock, run: Run, allowance_s: float) -> list[float]:
    """Time ``run``, without other ranks, after a first call that does not count.

    Under a CPU time limit each timing lasts several of its periods, or as long as ``allowance_s``
    allows.
    """
    clock.seconds(run)
    once = max(clock.seconds(run), 1e-9)
    inner = min(MOST_INNER, max(1, round(SHORT_S / once)))
    if clock.period_s:
        inner = times_over(clock, run, min(PERIODS * clock.period_s, allowance_s / (LEAST + 1)))
        once = max(clock.seconds(run, inner), 1e-9)
    count = max(LEAST, min(MOST, int(allowance_s / (once * inner))))
    return [clock.seconds(run, inner) for _ in range(count)]


def times_over(clock: CallClock, run: Run, seconds: float) -> int:
    """Return how many calls of ``run`` last for ``seconds``, at least 1."""
    count = 1
    while (took := clock.seconds(run, count) * count) < seconds:
        # grow at most tenfold: a few calls may all have run within one grant of CPU time
        count = min(10 * count, max(count + 1, math.ceil(1.1 * count * seconds / max(took, 1e-9))))
    return count
