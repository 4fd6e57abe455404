"""State that one island gives another, which joins: what all agree on, and what is under way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hybridcomp.sync.progress import Meeting, Progress
from hybridcomp.sync.recurrence import Fragment


def arrived() -> None:
    """Return: the message of an island that is a job lies at the rendezvous."""


def state_for_others(progress: Progress) -> dict[str, Any]:
    """Return start copies, momentum, the clock and the schedule of what is under way."""
    momenta = [part.fragment.momentum for part in progress.parts]
    return {
        "start": [part.fragment.start.cpu() for part in progress.parts],
        "momentum": [None if one is None else one.cpu() for one in momenta],
        "clock": progress.clock,
        "unsent": progress.unsent,
        "meetings": [[meeting.index, meeting.due] for meeting in progress.under_way],
    }


def take_state(state: Mapping[str, Any], progress: Progress, write: Callable[..., None]) -> None:
    """Put another island's state into ``progress``, without messages in what is under way.

    ``write``: puts a fragment's values, by its index, into this rank's weights.
    """
    for index, part in enumerate(progress.parts):
        like, rule = part.fragment.start, part.fragment.rule
        part.fragment = Fragment(rule, state["start"][index].to(like))
        if state["momentum"][index] is not None:
            part.fragment.momentum = state["momentum"][index].to(like)
        if rule.keeps_progress:
            part.fragment.base = part.fragment.start.clone()
        write(index, part.fragment.start)
    progress.clock, progress.unsent = int(state["clock"]), bool(state["unsent"])
    progress.under_way = []
    for index, due in state["meetings"]:
        progress.parts[index].fragment.listen()
        nothing = torch.empty(0, dtype=torch.uint8)
        progress.under_way.append(Meeting(index, due, nothing, arrived))
