"""Transfer state from an island to a joining one: the common state and pending meetings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hybridcomp.errors import CodecError
from hybridcomp.job import saved
from hybridcomp.sync.progress import Meeting, Progress
from hybridcomp.sync.recurrence import Fragment


def arrived() -> None:
    """Do nothing: a separate job's message is already at the rendezvous."""


def state_for_others(progress: Progress) -> dict[str, Any]:
    """Return the state for a joining island: start copies, momentum, clock, pending meetings."""
    momenta = [part.fragment.momentum for part in progress.parts]
    return {
        "start": [part.fragment.start.cpu() for part in progress.parts],
        "momentum": [None if one is None else one.cpu() for one in momenta],
        "clock": progress.clock,
        "unsent": progress.unsent,
        "meetings": [[meeting.index, meeting.due] for meeting in progress.under_way],
    }


def take_state(state: Mapping[str, Any], progress: Progress, write: Callable[..., None]) -> None:
    """Load another island's state into ``progress``, with pending meetings, without their messages.

    ``write(index, values)``: writes the values of fragment ``index`` into this rank's weights.
    Raises CodecError, with nothing changed, if the state is not that of a matching island.
    """
    if problem := _problem(state, progress):
        raise CodecError(
            f"another island gave a state that does not fit: {problem}; start all islands with the "
            "same model and version of hybridcomp"
        )
    fragments = []
    for index, part in enumerate(progress.parts):
        like, rule = part.fragment.start, part.fragment.rule
        fragment = Fragment(rule, state["start"][index].to(like))
        if state["momentum"][index] is not None:
            fragment.momentum = state["momentum"][index].to(like)
        if rule.keeps_progress:
            fragment.base = fragment.start.clone()
        fragments.append(fragment)
    under_way = []
    for index, due in state["meetings"]:
        fragments[index].listen()
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        under_way.append(Meeting(index, due, nothing, arrived))
    for index, fragment in enumerate(fragments):
        write(index, fragment.start)
    for part, fragment in zip(progress.parts, fragments, strict=True):
        part.fragment = fragment
    progress.clock, progress.unsent = state["clock"], state["unsent"]
    progress.under_way = under_way


def _problem(state: Mapping[str, Any], progress: Progress) -> str | None:
    """Return what is wrong with a peer's ``state``; None if nothing is."""
    lacking = {"start", "momentum", "clock", "unsent", "meetings"} - set(state)
    if lacking:
        return f"it lacks {', '.join(sorted(lacking))}"
    count = len(progress.parts)
    for name in ("start", "momentum"):
        if not isinstance(state[name], list) or len(state[name]) != count:
            return f"{name} is not of {count} fragment(s)"
        for one, part in zip(state[name], progress.parts, strict=True):
            if one is None and name == "momentum":
                continue
            if not isinstance(one, Tensor) or not _is_like(one, part.fragment.start):
                return f"{name} is not of this island's lengths and dtype, or not finite"
    if not saved.is_count(state["clock"]) or not isinstance(state["unsent"], bool):
        return f"its clock is {state['clock']!r}"
    if not isinstance(state["meetings"], list):
        return f"what is under way is {state['meetings']!r}"
    for meeting in state["meetings"]:
        known = (
            isinstance(meeting, list) and len(meeting) == 2 and all(map(saved.is_count, meeting))
        )
        if not known or meeting[0] >= count:
            return f"a meeting under way is {meeting!r}"
    return None


def _is_like(tensor: Tensor, start: Tensor) -> bool:
    same = (tensor.shape, tensor.dtype) == (start.shape, start.dtype)
    return same and bool(tensor.isfinite().all())
