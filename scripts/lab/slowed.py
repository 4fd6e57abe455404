"""A rank on a slower processor: what it computes takes longer, what its messages take stays.

Ranks that share cores take what the others leave, so that one that computes alone is faster than
beside others, and its messages wait for a core, which on a machine of their own they do not. A
quota of a control group does not mend that: it is held by the kernel's ticks (4 ms), and it stops
the threads that move bytes as well. Here a rank that has computed for some seconds of a core sleeps
until ``times`` as many have gone by, so that with as many ranks as ``times`` the cores have, each
is as fast beside the others as it is alone, and the cores are free for messages most of the time.

The rank sleeps where anybody could see that it was too fast: before it sends, before it waits, and
before it reads the clock.

Where the kernel moves packets it charges that to whoever runs just then, so the seconds of a core
that a rank has used are more beside messages than without. What is done over and over can have a
``Score``: how long each stretch of it takes at its shortest, beside nothing else. From then on each
takes that long.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import Work

#: what hands something to others or waits for them
CALLS = (
    "isend", "irecv", "batch_isend_irecv", "barrier", "broadcast", "all_reduce", "all_gather",
    "all_gather_into_tensor", "all_gather_object", "all_to_all_single", "reduce_scatter",
)  # fmt: skip


class Score:
    """What stretches of computing take in something that is done over and over, in seconds.

    shortest: of each stretch, in order. fixed: whether they take just that long from now on.
    """

    def __init__(self) -> None:
        self.shortest: list[float] = []
        self.fixed = False

    def learn(self, found: list[float]) -> None:
        """Take over what was shorter than ever. Raises RuntimeError for other stretches."""
        if len(found) != len(self.shortest or found):
            known = len(self.shortest)
            raise RuntimeError(f"expected {known} stretches of computing, found {len(found)}")
        self.shortest = [min(pair) for pair in zip(found, self.shortest or found, strict=True)]


class Slowed:
    """The main thread of this process, on a processor that is ``times`` slower."""

    def __init__(self, times: float) -> None:
        self.times = times
        self.clock = time.perf_counter
        self.late = 0.0  # seconds by which other work made this rank slower than it should be
        self._score: Score | None = None
        self._found: list[float] = []
        self._restart()

    @contextlib.contextmanager
    def playing(self, score: Score) -> Iterator[None]:
        """The body's stretches of computing make the score, or take as long as it says."""
        self.settle()
        self._score, self._found = score, []
        try:
            yield
            self.settle()
            if not score.fixed or len(self._found) != len(score.shortest):
                score.learn(self._found)
        finally:
            self._score = None

    def settle(self) -> None:
        """Sleep until what was computed since the last time has taken as long as it should."""
        used, score = time.thread_time() - self._used, self._score
        if score is not None:
            place = len(self._found)
            self._found.append(used)
            if score.fixed and place < len(score.shortest):
                used = score.shortest[place]
        left = self._since + self.times * used - self.clock()
        if left > 0:
            time.sleep(left)
        else:
            self.late -= left
        self._restart()

    def outside(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call`` with the seconds that it takes by itself, whichever processor there is."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.settle()
            try:
                return call(*args, **kwargs)
            finally:
                self._restart()

        return run

    def read(self) -> float:
        """The clock, once the rank has slept."""
        self.settle()
        return self.clock()

    def _restart(self) -> None:
        self._since, self._used = self.clock(), time.thread_time()


@contextlib.contextmanager
def slowed(times: float) -> Iterator[Slowed]:
    """The calling thread as on a processor that is ``times`` slower, in the body."""
    own = Slowed(times)
    places = [(Work, "wait"), (time, "perf_counter"), *((dist, name) for name in CALLS)]
    kept = [(where, name, getattr(where, name)) for where, name in places]
    try:
        for where, name, call in kept:
            setattr(where, name, own.read if where is time else own.outside(call))
        yield own
    finally:
        for where, name, call in kept:
            setattr(where, name, call)
