"""Gates: where the ranks of an operation wait for each other, or learn that one has failed.

An operation (``together.together``) is done by all of its ranks or by none. Code inside of one
needs no reference to it: ``gate`` stands in front of each collective, ``check_failed`` in each wait
for another rank. Outside of operations both do nothing.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence

import torch.distributed as dist

Ranks = tuple[int, ...]


class Operation(ABC):
    """Represent an operation that several ranks perform together, on one of them.

    Attributes:
        name: in the keys of the store, the same on all of its ranks and no other operation's.
        rounds: statements so far among the ranks of a part of the job; None: all ranks.
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
        """Return once all ranks of ``group`` have come here; raise where one has failed."""

    def before_message(self) -> None:  # noqa: B027
        """Pass a gate in front of a message of training, where that is cheap."""

    @abstractmethod
    def fail(self, problem: BaseException) -> None:
        """Tell the others of a failure of this rank."""

    @abstractmethod
    def told_before(self, problem: BaseException) -> Exception | None:
        """Return the failure of another rank that ``problem`` follows from, if one was told."""


class _Here(threading.local):
    """Operations of this thread, the innermost last; background threads have none."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []


here = _Here()


def gate(group: dist.ProcessGroup | None = None) -> None:
    """Return once all ranks of ``group`` can take part in a collective; None: of the operation."""
    for operation in here.operations:
        operation.gate(group)


def check_failed(is_there: Callable[[], object] = bool) -> None:
    """Raise if another rank has failed in the operation in which this rank waits.

    ``is_there``: says whether what is waited for is there; then the failure came after it.
    """
    for operation in here.operations:
        operation.check(is_there)
