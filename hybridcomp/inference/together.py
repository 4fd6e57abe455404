"""Make all workers of an engine switch to a version, or none; only one worker raises errors.

vLLM's ``MultiprocExecutor.collective_rpc`` reads the workers' answers in order and raises at the
first error. The unread answers of later workers stay in their queues, and each later request would
read the previous request's answer. So the workers first exchange their results, and only the last
worker raises; by then all others have answered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist

from hybridcomp.errors import PublishError
from hybridcomp.escaping import SENTENCE, one_line
from hybridcomp.job.member_groups import new_member_group


class Workers:
    """The workers of one engine, of which this process is one."""

    def __init__(self, count: int) -> None:
        """Create the process group of an engine's ``count`` workers, if several; all call this.

        The workers are consecutive ranks of the default group, which may hold several engines.
        """
        self._count, self._group = count, None
        self._speaks = True
        if count > 1:
            first = dist.get_rank() // count * count
            ranks = list(range(first, first + count))
            self._group = new_member_group(ranks, backend="gloo")
            self._speaks = dist.get_rank() == ranks[-1]

    def problem(self, work: Callable[[], object]) -> str | None:
        """Do ``work`` on all workers; every worker returns the error of the first that failed."""
        mine = None
        try:
            work()
        except Exception as error:
            is_ours = isinstance(error, PublishError)
            mine = one_line(error, SENTENCE)
            mine = mine if is_ours else f"{type(error).__name__}: {mine}"
        if self._group is None:
            return mine
        said: list[Any] = [None] * self._count
        dist.all_gather_object(said, mine, group=self._group)
        bad = [(rank, text) for rank, text in enumerate(said) if text is not None]
        if not bad:
            return None
        return f"worker {bad[0][0]} of {self._count}: {bad[0][1]}"

    def tell(self, problem: str | None) -> None:
        """Raise PublishError with ``problem`` on the last worker; the others return."""
        if problem is not None and self._speaks:
            raise PublishError(problem)


class Beside:
    """Run work in a thread, one task at a time, while the worker answers requests."""

    def __init__(self) -> None:
        self._wanted: object = None
        self._thread: threading.Thread | None = None
        self._outcome: Future[Any] = Future()

    def begin(self, wanted: object, work: Callable[[], object]) -> None:
        """Begin ``work`` once the previous task has ended; ``wanted`` identifies the new task."""
        # a new Future: the previous thread may still write to the old one
        before, outcome = self._thread, Future[Any]()

        def run() -> None:
            if before is not None:
                before.join()
            try:
                outcome.set_result(work())
            except Exception as error:
                outcome.set_exception(error)

        self._wanted, self._outcome = wanted, outcome
        self._thread = threading.Thread(target=run, name="hybridcomp-beside", daemon=True)
        self._thread.start()

    def result(self, wanted: object, work: Callable[[], Any]) -> Any:
        """Return the result (or raise the error) of the task ``wanted``, else run ``work``."""
        self.end()
        if self._wanted != wanted or wanted is None:
            return work()
        self._wanted = None
        return self._outcome.result()

    def end(self) -> None:
        """Wait for the thread to end."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
