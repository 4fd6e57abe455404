"""Steps of collectives that send no message, or a single one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.distributed import Work

from hybridcomp.collectives.wire.handle import Meter, Pending, Steps

T = TypeVar("T")


def given(result: T) -> Steps[T]:
    """Return the steps of a collective that already has its ``result`` and sends nothing."""
    yield from ()
    return result


def transfer(post: Callable[[], Work], meter: Meter) -> None:
    """Run a collective that is a single message: ``post`` it, wait for it."""

    def steps() -> Steps[None]:
        yield post()

    Pending(steps(), meter, async_op=False)
