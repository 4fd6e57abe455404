"""Save and load the state of meetings: start copies, outer momentum, residuals and clocks.

Each rank saves an entry. If the islands are the same, each rank loads its own entry bit for bit,
including pending meetings. If only the number of islands has changed, not their width, each rank
takes the common state from a rank that has read it. Residuals are then averaged, which keeps the
mean of unsent changes, and pending meetings are given up, so that their content is sent again.
Islands of another width start over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.job import saved, small_messages
from hybridcomp.job.agreement import tell
from hybridcomp.sync.exact_sends import broadcast
from hybridcomp.sync.islands import Islands
from hybridcomp.sync.progress import Meeting, Part, Progress
from hybridcomp.sync.recurrence import PendingRound

FILES = "hybridcomp_sync_rank_*.pt"
WHAT = "the state of islands"
#: keys of an entry, and a check of each value
_KEYS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("world_size", "rank", "islands", "index", "clock"), saved.is_count),
    "weights": lambda value: isinstance(value, str),
    **dict.fromkeys(("parts", "meetings"), lambda value: isinstance(value, list)),
}
_TENSORS = ("start", "momentum", "residual", "base")
_PART = (*_TENSORS, "under_way", "cut")
#: tensors of a part that must be finite, with words for each
_FINITE = {
    "start": "a start copy of the weights",
    "momentum": "outer momentum",
    "residual": "what error feedback kept",
}


def state_of(progress: Progress, weights: str, islands: int, index: int) -> dict[str, Any]:
    """Return this rank's checkpoint entry; call it after all pending messages have arrived.

    ``weights``: digest of the rank's weights; ``islands``: number of islands; ``index``: index of
    this rank's island.
    """
    return {
        "format": saved.FORMAT,
        "world_size": dist.get_world_size(),
        "rank": dist.get_rank(),
        "islands": islands,
        "index": index,
        "clock": progress.clock,
        "weights": weights,
        "parts": [_part_state(part) for part in progress.parts],
        "meetings": [[m.index, m.due, m.rows.cpu()] for m in progress.under_way],
    }


def _part_state(part: Part) -> dict[str, Any]:
    fragment = part.fragment
    found = {name: _cpu(getattr(fragment, name)) for name in ("start", "momentum", "residual")}
    sent = [[_cpu(one.message), _cpu(one.kept), _cpu(one.moved)] for one in fragment.under_way]
    cut = [part.low, part.high, part.numel]
    return {**found, "base": _cpu(fragment.base), "under_way": sent, "cut": cut}


def _cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().cpu().clone()


def checked(name: Path | str, entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``entry``. Raises CheckpointError unless it has the form of ``state_of``."""
    for key, right in _KEYS.items():
        saved.expect(name, entry, key, right)
    for part in entry["parts"]:
        if problem := _odd_part(part):
            raise saved.damaged(name, problem)
    parts, meetings = entry["parts"], entry["meetings"]
    if not all(_is_meeting(meeting, entry) for meeting in meetings):
        raise saved.damaged(name, "what it holds of meetings under way is none")
    for index, part in enumerate(parts):
        count = sum(meeting[0] == index for meeting in meetings)
        if count != len(part["under_way"]):
            what = f"{len(part['under_way'])} messages of fragment {index} belong to {count}"
            raise saved.damaged(name, f"{what} meetings under way")
    return entry


def _odd_part(part: Any) -> str | None:
    """Return what is wrong with a state of ``_part_state``; None if nothing is.

    Pending messages need not be finite, since all islands skip those of a diverged island, but
    values that enter the next meeting must be.
    """
    if not isinstance(part, dict) or not set(_PART) <= set(part):
        return f"a part has not all of {', '.join(_PART)}"
    cut, start, under_way = part["cut"], part["start"], part["under_way"]
    if not (isinstance(cut, (list, tuple)) and len(cut) == 3 and all(map(saved.is_count, cut))):
        return f"a part is cut by {cut!r}"
    if not isinstance(start, Tensor) or not _is_like(start, start) or start.numel() != cut[2]:
        return "a start copy of the weights is missing or of another length"
    if not isinstance(under_way, (list, tuple)) or not all(map(_is_sent, under_way)):
        return "what it holds of messages under way is none"
    sent = [message for row in under_way for message in row]
    for what, tensors in {**{key: [part[key]] for key in _TENSORS}, "under_way": sent}.items():
        for tensor in filter(lambda one: one is not None, tensors):
            if not _is_like(tensor, start):
                return f"{what} is not of the length and dtype of the start copy"
            if what in _FINITE and not bool(tensor.isfinite().all()):
                return f"{_FINITE[what]} is not finite"
    return None


def _is_sent(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 3


def _is_like(tensor: Any, start: Tensor) -> bool:
    """Return whether ``tensor`` is a vector of the same form as a start copy."""
    if not isinstance(tensor, Tensor) or tensor.dim() != 1 or not tensor.is_floating_point():
        return False
    return bool(tensor.shape == start.shape and tensor.dtype is start.dtype)


def _is_meeting(value: Any, entry: Mapping[str, Any]) -> bool:
    """Return whether ``value`` is ``[fragment, step, rows]`` of a pending meeting."""
    if not _is_sent(value) or not all(map(saved.is_count, value[:2])):
        return False
    index, _, rows = value
    if index >= len(entry["parts"]) or not isinstance(rows, Tensor) or rows.dim() != 1:
        return False
    if rows.dtype == torch.uint8:  # a message of an island that is a separate job
        return True
    start = entry["parts"][index]["start"]
    return bool(rows.dtype == start.dtype and rows.numel() == entry["islands"] * start.numel())


def path_of(folder: Path, rank: int) -> Path:
    """Return the path of a rank's file."""
    return folder / FILES.replace("*", f"{rank:05d}")


def write(folder: Path, entry: Mapping[str, Any] | None) -> None:
    """Write this rank's ``entry``, None before the first meeting, into ``folder``; a collective."""
    _, problem = saved.attempt(lambda: _write(folder, entry))
    saved.all_well(problem, WHAT)


def _write(folder: Path, entry: Mapping[str, Any] | None) -> None:
    """Write this rank's file; on rank 0 also remove files of ranks that no longer exist."""
    if entry is not None:
        saved.write(path_of(folder, dist.get_rank()), entry)
    if dist.get_rank() == 0:
        saved.sweep(folder, FILES, dist.get_world_size())
        now = [path_of(folder, rank) for rank in range(dist.get_world_size() if entry else 0)]
        for path in set(folder.glob(FILES)) - set(now):
            saved.remove(path)


def read(folder: Path) -> list[Mapping[str, Any]]:
    """Read the entries in ``folder`` that this rank is assigned, maybe none; a collective.

    Raises CheckpointError on every rank if any rank's file is damaged or missing.
    """
    found, problem = saved.attempt(lambda: _read(folder))
    saved.all_well(problem, WHAT, f"Restore it, or delete every {FILES} to begin anew")
    return found or []


def _read(folder: Path) -> list[Mapping[str, Any]]:
    size = len(list(folder.glob(FILES)))
    found = []
    for rank in range(dist.get_rank(), size, dist.get_world_size()):
        path = path_of(folder, rank)
        entry = checked(path, saved.read(path))
        if entry["rank"] != rank:
            raise saved.damaged(path, f"it is of rank {entry['rank']}")
        if entry["world_size"] != size:
            raise saved.damaged(path, f"{entry['world_size']} ranks wrote files, {size} are there")
        found.append(entry)
    return found


def taken_over(
    entries: Sequence[Mapping[str, Any]], progress: Progress, islands: Islands, weights: str
) -> str | None:
    """Load ``entries`` into ``progress``, whose parts hold the current weights; a collective.

    If islands must start over, returns why, the same on all ranks: there are no entries, or the
    islands that saved them have another width, other fragments or other weights.
    """
    here = [[part.low, part.high, part.numel] for part in progress.parts]
    own = (dist.get_world_size(), dist.get_rank(), len(islands.rows))
    said = tell(
        {
            "there": len(entries),
            "fits": all(
                [part["cut"] for part in entry["parts"]] == here and entry["weights"] == weights
                for entry in entries
            ),
            "own": [(one["world_size"], one["rank"], one["islands"]) for one in entries] == [own],
            "count": max((entry["islands"] for entry in entries), default=0),
        },
        what=WHAT,
    )
    if not any(rank["there"] for rank in said):
        return "the checkpoint holds no state of islands"
    if not all(rank["fits"] for rank in said):
        return "the checkpoint is of islands of another width, or with other fragments or weights"
    if all(rank["own"] for rank in said):
        load_entry(entries[0], progress)
    else:
        _load_shared(entries, progress, islands, max(rank["count"] for rank in said))
    return None


def entry_of_island(
    entries: Sequence[Mapping[str, Any]], progress: Progress, weights: str, late: int
) -> Mapping[str, Any] | None:
    """Return the entry that this rank saved when its island was a separate job.

    Returns None on all ranks if the number of ranks or the weights differ, if the islands were
    parts of one job, or if means of the pending meetings are not due ``late`` steps after a
    meeting's begin. A collective of the job.
    """
    own = (dist.get_world_size(), dist.get_rank(), 1)
    here = [[part.low, part.high, part.numel] for part in progress.parts]
    fits = len(entries) == 1 and all(
        (entry["world_size"], entry["rank"], entry["islands"]) == own
        and [part["cut"] for part in entry["parts"]] == here
        and entry["weights"] == weights
        and isinstance(entry.get("run"), str)
        and saved.is_count(entry.get("meeting"))
        and (not entry["meetings"] or entry.get("late") == late)
        for entry in entries
    )
    said = tell({"fits": fits}, what=WHAT)
    return entries[0] if all(rank["fits"] for rank in said) else None


def load_entry(entry: Mapping[str, Any], progress: Progress) -> None:
    """Load a rank's own entry into ``progress``, bit for bit."""
    progress.clock = int(entry["clock"])
    for part, state in zip(progress.parts, entry["parts"], strict=True):
        fragment, like = part.fragment, part.fragment.start
        for name in ("start", "momentum", "residual", "base"):
            setattr(fragment, name, _like(state[name], like))
        fragment.under_way = deque(
            PendingRound(*(_like(one, like) for one in sent)) for sent in state["under_way"]
        )
    for index, due, rows in entry["meetings"]:
        like = progress.parts[index].fragment.start
        progress.under_way.append(Meeting(index, due, rows.to(like.device), lambda: None))


def _like(tensor: Tensor | None, like: Tensor) -> Tensor | None:
    return None if tensor is None else tensor.to(like.device, like.dtype)


def _load_shared(
    entries: Sequence[Mapping[str, Any]], progress: Progress, islands: Islands, count: int
) -> None:
    """Fetch the common state from the first peer that has it; ``count``: islands that saved."""
    peers, rows = islands.peers, islands.rows
    clocks = small_messages.gather_objects(
        entries[0]["clock"] if entries else None, peers
    )  # all entries are of one checkpoint, so equal in this
    first = next(index for index, clock in enumerate(clocks) if clock is not None)
    source = rows[first][islands.place]
    progress.clock = int(clocks[first] or 0)
    for index, part in enumerate(progress.parts):
        states = [entry["parts"][index] for entry in entries]
        fragment, like = part.fragment, part.fragment.start
        if states:
            fragment.start.copy_(states[0]["start"])
        momentum = _like(states[0]["momentum"], like) if states else None
        fragment.momentum = torch.zeros_like(like) if momentum is None else momentum
        left = torch.zeros_like(like)
        for state in states:
            for one in (state["residual"], *(kept for _, kept, _ in state["under_way"])):
                if one is not None:
                    left.add_(one.to(like.device, like.dtype))
        for tensor in (fragment.start, fragment.momentum):
            broadcast(tensor, source, peers)
        if fragment.rule.error_feedback:
            fragment.residual = small_messages.total(left, peers).div_(count)
        if fragment.rule.keeps_progress:
            fragment.base = fragment.start.clone()
