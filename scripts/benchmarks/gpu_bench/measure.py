"""Time GPU work as a share of a copy of the same bytes in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

cuda: Any = torch.cuda  # partly untyped
#: exceeds the L2 cache of every current GPU (B200: 126 MB)
FLUSH_NBYTES = 256 << 20
MOST_FLUSHES = 16
#: rounds of host timing, and calls per round, whose launches fit the stream's queue
HOST_ROUNDS, HOST_CALLS = 7, 20
#: bytes of messages from which on the host's time is not measured: it would be the device's
LONG_NBYTES = 16 << 20


@dataclass(frozen=True)
class Work:
    """Work to time. ``nbytes``: the minimum that it has to read and write."""

    subject: str
    phase: str
    nbytes: int
    run: Callable[[], object]
    bits: float = 0.0  # per value in the payload
    note: str = ""


@dataclass(frozen=True)
class Point:
    """One measurement: seconds, GB/s read and written, and ``share``, that rate over a copy's."""

    subject: str
    phase: str
    dtype: str
    message_nbytes: int
    seconds: float
    gbps: float
    share: float
    bits: float
    note: str
    host_us: float = 0.0  # time to submit a short message's work, without waiting for it


class Stopwatch(Protocol):
    """Times a call."""

    def host_seconds(self, run: Callable[[], object]) -> float:
        """Return the host's seconds for one call of ``run``, without waiting for the device."""

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the device's seconds for one call of ``run``."""


class DeviceStopwatch:
    """Times with events on the current stream, with cold caches.

    Cache flushes before each repeat keep the GPU busy while the host queues the timed call, so that
    the result is device time unless ``run`` itself waits for the device.
    """

    def __init__(self, repeats: int) -> None:
        self._repeats = repeats
        self._flush = torch.empty(FLUSH_NBYTES, dtype=torch.uint8, device="cuda")
        # take the minimum of several flushes: the first ones run at an idle GPU's low clocks
        self._flush_s = min(self._once(self._flush.zero_, 1) for _ in range(20))

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the median of the repeats, after three that warm up (and compile)."""
        for _ in range(2):
            run()
        cuda.synchronize()
        start = time.perf_counter()
        run()
        count = flushes(time.perf_counter() - start, self._flush_s)
        return statistics.median(self._once(run, count) for _ in range(self._repeats))

    def _once(self, run: Callable[[], object], count: int) -> float:
        """Return device seconds of ``run`` after ``count`` flushes of the cache."""
        for _ in range(count):
            self._flush.zero_()
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def host_seconds(self, run: Callable[[], object]) -> float:
        """Return the median over rounds of consecutive calls, few enough for the device's queue."""
        found: list[float] = []
        for _ in range(HOST_ROUNDS):
            cuda.synchronize()
            start = time.perf_counter()
            for _ in range(HOST_CALLS):
                run()
            found.append((time.perf_counter() - start) / HOST_CALLS)
        cuda.synchronize()
        return statistics.median(found)


class HostStopwatch:
    """Times work that runs on the host; only for trying out a benchmark without a GPU."""

    def __init__(self, repeats: int) -> None:
        self._repeats = repeats

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the median of the repeats, after a warm-up call."""
        run()
        return statistics.median(self._once(run) for _ in range(self._repeats))

    host_seconds = seconds

    def _once(self, run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start


def flushes(host_s: float, flush_s: float) -> int:
    """Return how many flushes take ``host_s``, the time that the host needs to queue the call.

    At least one, for cold caches; bounded, since calls that wait for the device take longer.
    """
    return min(MOST_FLUSHES, 1 + int(1.5 * host_s / flush_s))


class Bench:
    """Measures works into points; ``device`` holds the reference copies."""

    def __init__(self, stopwatch: Stopwatch, device: torch.device) -> None:
        self._stopwatch = stopwatch
        self._device = device
        self._copies: dict[int, float] = {}

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the device's seconds for one call of ``run``."""
        return self._stopwatch.seconds(run)

    def copy_seconds(self, nbytes: int) -> float:
        """Return the seconds of a ``Tensor.copy_`` that reads and writes ``nbytes`` in all."""
        half = max(nbytes // 2, 1)
        if half not in self._copies:
            source = torch.empty(half, dtype=torch.uint8, device=self._device)
            target = torch.empty_like(source)
            self._copies[half] = self._stopwatch.seconds(lambda: target.copy_(source))
        return self._copies[half]

    def measure(self, work: Work, dtype: str, message_nbytes: int) -> Point:
        """Measure ``work``, and a copy of as many bytes to compute the share."""
        took, short = self._stopwatch.seconds(work.run), message_nbytes < LONG_NBYTES
        return Point(
            work.subject, work.phase, dtype, message_nbytes, took, work.nbytes / took / 1e9,
            self.copy_seconds(work.nbytes) / took, work.bits, work.note,
            self._stopwatch.host_seconds(work.run) * 1e6 if short else 0.0,
        )  # fmt: skip

    def copy_point(self, dtype: str, message_nbytes: int) -> Point:
        """Measure the ceiling: a copy of a whole message."""
        took, nbytes = self.copy_seconds(2 * message_nbytes), 2 * message_nbytes
        return Point(
            "device copy", "copy", dtype, message_nbytes, took, nbytes / took / 1e9, 1.0,
            0.0, "the ceiling",
        )  # fmt: skip
