"""Record one rank's progress: the step, its parts of fragments, and pending meetings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from hybridcomp.sync.recurrence import Fragment


@dataclass(eq=False)
class Part:
    """This rank's part of a fragment: elements ``low`` to ``high``, padded to ``numel``."""

    low: int
    high: int
    numel: int
    fragment: Fragment


@dataclass(eq=False)
class Meeting:
    """A meeting whose mean this rank has not taken yet.

    Attributes:
        index: index of the meeting's fragment.
        due: the step at which its mean is taken.
        rows: the messages of all islands, one per row, complete after ``wait``. If islands are
            separate jobs: only this island's own message, as bytes; empty if this island has sent
            nothing.
        wait: returns once the rows are complete.
        finite: waits for all islands' flags, and returns for each island whether its message is
            finite; None: values are checked when the mean is taken.
    """

    index: int
    due: int
    rows: Tensor
    wait: Callable[[], Any]
    finite: Callable[[], Tensor] | None = None


@dataclass(eq=False)
class Progress:
    """State of one rank's meetings.

    Attributes:
        clock: requested optimizer steps.
        parts: this rank's part of each fragment.
        under_way: meetings in the order in which their means are taken.
        unsent: whether the message due at ``clock`` still has to be sent.
    """

    clock: int = 0
    parts: list[Part] = field(default_factory=list)
    under_way: list[Meeting] = field(default_factory=list)
    unsent: bool = False

    def copy(self) -> Progress:
        """Return a copy with the same tensors, which are never modified."""
        parts = []
        for part in self.parts:
            kept = replace(part.fragment, under_way=part.fragment.under_way.copy())
            parts.append(replace(part, fragment=kept))
        return Progress(self.clock, parts, list(self.under_way), self.unsent)

    def give_up(self, count: int | None = None) -> None:
        """Give up the oldest ``count`` pending meetings; the next ones carry their content.

        ``count``: None: all.
        """
        for meeting in self.under_way[:count]:
            self.parts[meeting.index].fragment.skip()
        self.under_way = [] if count is None else self.under_way[count:]
