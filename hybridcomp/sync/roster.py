"""Decide on a meeting of islands that are separate jobs: ``Roster`` is the decision."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: progress of an island: the run, and the number of the meeting reached; None: no progress
Reached = tuple[str, int] | None


@dataclass(frozen=True)
class Roster:
    """Decision on a meeting.

    Attributes:
        number: number of the meeting; 0 is the beginning of a run.
        present: islands whose messages count, in the same order everywhere.
        joining: islands that take part from the next meeting on, with the progress of each.
        giver: the island from which joining ones take weights; "" if none joins.
        silent: members that did not stand in time.
        heard: number of announcements considered so far.
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
