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
    """A meeting whose mean is still to be taken.

    Attributes:
        index: the fragment.
        due: the step at which its mean is taken.
        rows: what all islands sent, one after the other; complete after ``wait``. Of an island that
            is a job: its own message, as bytes; none where it has sent nothing.
        wait: returns once the rows are there.
        finite: waits for the word of all islands, and returns by island whether what it has sent is
            finite; None: whoever takes the mean finds out.
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
        clock: steps that the optimizer was asked for.
        parts: by fragment.
        under_way: meetings in the order in which their means are taken.
        unsent: whether a message that is due at ``clock`` is still to be sent.
    """

    clock: int = 0
    parts: list[Part] = field(default_factory=list)
    under_way: list[Meeting] = field(default_factory=list)
    unsent: bool = False

    def copy(self) -> Progress:
        """Return the same with the same tensors, which are never changed."""
        parts = []
        for part in self.parts:
            kept = replace(part.fragment, under_way=part.fragment.under_way.copy())
            parts.append(replace(part, fragment=kept))
        return Progress(self.clock, parts, list(self.under_way), self.unsent)

    def give_up(self, count: int | None = None) -> None:
        """Give up the first meetings under way, all by default: their messages go out once more."""
        for meeting in self.under_way[:count]:
            self.parts[meeting.index].fragment.skip()
        self.under_way = [] if count is None else self.under_way[count:]
