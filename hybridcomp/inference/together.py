"""Have all workers of an engine hold a version or none, and one of them say why.

An executor that asks its workers in order, and raises at the first answer that is an error, leaves
the answers behind it in their queues: each later request reads the answer to the one before (vLLM's
``MultiprocExecutor.collective_rpc``). So the workers compare notes first, and the last one alone
raises, once all others have answered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from hybridcomp.errors import PublishError
from hybridcomp.foreign import one_line


class Workers:
    """The workers of one engine, of which this process is one."""

    def __init__(self, count: int) -> None:
        """Make a group of ``count`` workers; all of them call it. One needs no group.

        They are consecutive ranks of the default process group, which may have further engines.
        """
        self._count, self._group = count, None
        self._speaks = True
        if count > 1:
            first = dist.get_rank() // count * count
            ranks = list(range(first, first + count))
            self._group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
            self._speaks = dist.get_rank() == ranks[-1]

    def problem(self, work: Callable[[], object]) -> str | None:
        """Do ``work`` on all workers; return the first error of one of them, to all."""
        mine = None
        try:
            work()
        except Exception as error:
            is_ours = isinstance(error, PublishError)
            mine = one_line(error) if is_ours else f"{type(error).__name__}: {one_line(error)}"
        if self._group is None:
            return mine
        said: list[Any] = [None] * self._count
        dist.all_gather_object(said, mine, group=self._group)
        bad = [(rank, text) for rank, text in enumerate(said) if text is not None]
        if not bad:
            return None
        return f"worker {bad[0][0]} of {self._count}: {bad[0][1]}"

    def tell(self, problem: str | None) -> None:
        """Raise PublishError with ``problem``, on the last worker; the others return."""
        if problem is not None and self._speaks:
            raise PublishError(problem)


@dataclass
class _Outcome:
    """The result of a piece of work, or its error."""

    found: Any = None
    error: Exception | None = None


class Beside:
    """Work of a worker beside the requests that it answers, one piece at a time, in a thread."""

    def __init__(self) -> None:
        self._wanted: object = None
        self._thread: threading.Thread | None = None
        self._outcome = _Outcome()

    def begin(self, wanted: object, work: Callable[[], object]) -> None:
        """Begin ``work`` once what went before has ended; ``wanted`` is what it is for."""
        before, outcome = self._thread, _Outcome()  # its own: the one before may still be told

        def run() -> None:
            if before is not None:
                before.join()
            try:
                outcome.found = work()
            except Exception as error:
                outcome.error = error

        self._wanted, self._outcome = wanted, outcome
        self._thread = threading.Thread(target=run, name="hybridcomp-beside", daemon=True)
        self._thread.start()

    def result(self, wanted: object, work: Callable[[], Any]) -> Any:
        """Return what was begun for ``wanted``, or else what ``work`` returns; raises its error."""
        self.end()
        if self._wanted != wanted or wanted is None:
            return work()
        self._wanted = None
        if self._outcome.error is not None:
            raise self._outcome.error
        return self._outcome.found

    def end(self) -> None:
        """Wait until the thread has ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
