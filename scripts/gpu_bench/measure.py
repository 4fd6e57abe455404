"""Time on a GPU, as a share of what a copy of the same bytes reaches in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

cuda: Any = torch.cuda  # parts of it are untyped
#: larger than the second-level cache of any GPU of today (B200: 126 MB)
FLUSH_NBYTES = 256 << 20


@dataclass(frozen=True)
class Work:
    """Something to time. ``nbytes``: what it has to read and to write, at least."""

    subject: str
    phase: str
    nbytes: int
    run: Callable[[], object]
    note: str = ""


@dataclass(frozen=True)
class Point:
    """One measurement: seconds, bytes a second, and these over those of a copy of equal bytes."""

    subject: str
    phase: str
    dtype: str
    message_nbytes: int
    seconds: float
    gbps: float
    share: float
    note: str


class Clock:
    """Times kernels with events, with cold caches; knows what a copy takes."""

    def __init__(self, repeats: int) -> None:
        self._repeats = repeats
        self._flush = torch.empty(FLUSH_NBYTES, dtype=torch.uint8, device="cuda")
        self._copies: dict[int, float] = {}

    def seconds(self, run: Callable[[], object]) -> float:
        """Median of the repeats, after two that warm up (and compile)."""
        for _ in range(2):
            run()
        found = []
        for _ in range(self._repeats):
            self._flush.zero_()
            start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / 1e3)
        return statistics.median(found)

    def copy_seconds(self, nbytes: int) -> float:
        """What ``Tensor.copy_`` takes to read and write ``nbytes`` in all."""
        half = max(nbytes // 2, 1)
        if half not in self._copies:
            source = torch.empty(half, dtype=torch.uint8, device="cuda")
            target = torch.empty_like(source)
            self._copies[half] = self.seconds(lambda: target.copy_(source))
        return self._copies[half]

    def measure(self, work: Work, dtype: str, message_nbytes: int) -> Point:
        """``work`` and, for its share, a copy."""
        took = self.seconds(work.run)
        return Point(
            work.subject, work.phase, dtype, message_nbytes, took, work.nbytes / took / 1e9,
            self.copy_seconds(work.nbytes) / took, work.note,
        )  # fmt: skip
