"""Record a decision on a meeting of islands that are jobs of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: how far an island has got, in a run: the run, and its meetings; None: nowhere
Reached = tuple[str, int] | None


@dataclass(frozen=True)
class Roster:
    """Decision on a meeting.

    Attributes:
        number: of the meeting; 0 is none, but the beginning of a run.
        present: islands whose messages count, in one order on all.
        joining: islands that take part from the next one on, with how far they had got.
        giver: the island from which these take weights; "" where none joins.
        silent: members that did not stand in time.
        heard: announcements that were looked at.
    """

    number: int
    present: list[str]
    joining: dict[str, list[Any] | None] = field(default_factory=dict)
    giver: str = ""
    silent: list[str] = field(default_factory=list)
    heard: int = 0

    @property
    def members(self) -> list[str]:
        """Return the islands that the next meeting waits for."""
        return [*self.present, *self.joining]
