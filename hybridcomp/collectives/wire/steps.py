"""Make steps of a collective: without a message, with one, or of several that run side by side."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch.distributed import Work

from hybridcomp.collectives.wire.handle import Meter, Pending, Steps

T = TypeVar("T")


def given(result: T) -> Steps[T]:
    """Return the steps of a collective that has its ``result`` without a message."""
    yield from ()
    return result


def ended(steps: Steps[None], result: T) -> Steps[T]:
    """Return ``steps`` as those of a collective with this ``result``."""
    yield from steps
    return result


def transfer(post: Callable[[], Work], meter: Meter) -> None:
    """Run a collective that is a single message: ``post`` it, wait for it."""

    def steps() -> Steps[None]:
        yield post()

    Pending(steps(), meter, async_op=False)


def overlapped(rounds: Sequence[Steps[None]]) -> Steps[None]:
    """Run collectives side by side: start all, then continue each in turn after its message.

    The order depends only on their number of steps, so all ranks post the same messages in the same
    order. All first messages are under way when a handle is returned. One alone is returned as it
    is: to go through another generator would cost at each step.
    """
    return rounds[0] if len(rounds) == 1 else _side_by_side(rounds)


def _side_by_side(rounds: Sequence[Steps[None]]) -> Steps[None]:
    waiting: deque[tuple[Steps[None], Work]] = deque()

    def advance(steps: Steps[None]) -> None:
        for work in steps:
            waiting.append((steps, work))
            return

    for steps in rounds:
        advance(steps)
    while waiting:
        steps, work = waiting.popleft()
        yield work
        advance(steps)
