"""Gates: points where the ranks of an operation wait for each other or learn of a failure.

An operation (``together.together``) is done by all of its ranks or by none. Code inside it needs no
reference to the operation: the code calls ``gate`` before each collective, and ``check_failed`` in
each wait for another rank. Outside of operations, ``gate`` and ``check_failed`` do nothing.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

Ranks = tuple[int, ...]
T = TypeVar("T")


class PerJob(Generic[T]):
    """A value of this rank for each default process group, which ends with the group.

    For counts that must be equal on all ranks: a process that initializes torch.distributed again
    may meet processes that are new, or that have counted otherwise.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: WeakKeyDictionary[Any, T] = WeakKeyDictionary()

    @property
    def here(self) -> T:
        """Return the value of the present default group, or of no group; at first ``make()``."""
        world = dist.group.WORLD
        key = self if world is None else world
        if key not in self._values:
            self._values[key] = self._make()
        return self._values[key]


class Operation(ABC):
    """An operation that several ranks perform together, as one of them sees it.

    Attributes:
        name: name in store keys, the same on all ranks of the operation, and unique.
        rounds: number of statement rounds so far; keys are the ranks that exchange statements, None
            for all ranks.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.rounds: Counter[Ranks | None] = Counter()

    @abstractmethod
    def takes_in(self, ranks: Sequence[int]) -> bool:
        """Return whether all of these global ranks take part."""

    @abstractmethod
    def check(self, is_there: Callable[[], object]) -> None:
        """Raise if a participating rank has failed, unless ``is_there`` returns true."""

    @abstractmethod
    def gate(self, group: dist.ProcessGroup | None = None) -> None:
        """Return once all ranks of ``group`` have arrived; raise if one has failed."""

    def before_message(self) -> None:  # noqa: B027
        """Pass a gate before a message of training, if that is cheap."""

    @abstractmethod
    def fail(self, problem: BaseException) -> None:
        """Tell the other ranks that this rank has failed."""

    @abstractmethod
    def told_before(self, problem: BaseException) -> Exception | None:
        """Return the reported failure of another rank that caused ``problem``, if any."""


class _Here(threading.local):
    """Operations of this thread, the innermost last; background threads have none."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []


here = _Here()


def gate(group: dist.ProcessGroup | None = None) -> None:
    """Return once all ranks of ``group`` (None: the operation's) can take part in a collective."""
    for operation in here.operations:
        operation.gate(group)


def check_failed(is_there: Callable[[], object] = bool) -> None:
    """Raise if another rank has failed in the operation that this rank is inside.

    ``is_there``: returns whether the awaited event has happened; if so, nothing is raised.
    """
    for operation in here.operations:
        operation.check(is_there)
