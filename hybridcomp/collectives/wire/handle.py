"""Handles: a collective is a generator that yields what it waits for.

A collective such as all_reduce has local work between and after its messages. Written as a
generator it keeps its numbered steps in one body; a handle runs it up to its first message when
it is made and drives the rest in ``wait()``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from torch import Tensor
from torch.distributed import Work

from hybridcomp import presence
from hybridcomp.collectives.wire.meter import Meter

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
#: the steps of a collective: yields the works to wait for, returns the result
Steps = Generator[Work, None, T]


class Pending(Generic[T]):
    """A collective under way. Its first message is posted when this is constructed."""

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
        Raises what the collective raised, again on every call.
        """
        while not self._completed:
            if self._error is not None:
                raise self._error
            assert self._work is not None
            try:
                with self._meter.waiting():
                    self._work.wait()
            except BaseException as error:
                failure = self._failed(error)
                if failure is error:
                    raise
                raise failure from error
            self._advance()
        return cast(T, self._result)

    def rest(self) -> Steps[T]:
        """``wait()`` as the steps of another collective, which does the waiting."""
        while not self._completed:
            assert self._work is not None
            yield self._work
            self._advance()
        return cast(T, self._result)

    def is_completed(self) -> bool:
        """Whether ``wait()`` has run to its end. Asking makes no progress."""
        return self._completed

    def then(self, callback: Callable[[], None]) -> Self:
        """Call ``callback`` once after completion, now if that was before; returns self."""
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
        """What ``wait()`` raises from now on: who is missing, where ``error`` is about that."""
        self._error = presence.lost(error, self._meter.where) or error
        return self._error


class Handle(Pending[None]):
    """The handle of ``all_reduce``, ``all_gather`` and ``all_to_all``."""


class ReduceScatterHandle(Pending[Tensor]):
    """The handle of ``reduce_scatter``; ``wait()`` returns the sum."""
