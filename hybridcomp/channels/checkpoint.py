"""What a session keeps beside an engine's checkpoint: one file for the job, one for each rank.

``hybridcomp_state.json`` has the step, the loss scale and the groups of the job; older versions
wrote it for Megatron only. The files of the ranks hold residuals, the guard, and what ``auto``
found out; they exist where there is any of it. Neither is part of upstream's files: DeepSpeed's
client_state is written by one rank only, and residuals differ on every rank. With another number
of ranks, or other nodes under them, their sum is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridcomp.channels import Channels, checkpoint_note
from hybridcomp.log import say

FORMAT = 1
#: the file of the job
STATE = "hybridcomp_state.json"


@dataclass(frozen=True)
class State:
    """What is the same on all ranks."""

    step: int  # optimizer steps taken
    loss_scale: float  # that residuals are in units of
    groups: dict[str, int] = field(default_factory=dict)  # ranks in each, by dimension
    format: int = FORMAT


def _path(folder: Path, rank: int) -> Path:
    return folder / f"{checkpoint_note.RESIDUALS}_rank_{rank:05d}.pt"


def needed(channels: Channels) -> bool:
    """Whether there is anything to save; equal on every rank."""
    known = bool(channels.guard.trips) or bool(channels.link.verdicts)
    known = known or bool(channels.host.pace.state())
    return known or any(channel.error_feedback for channel in channels)


def save(
    folder: Path,
    channels: Channels,
    loss_scale: float,
    groups: Mapping[str, int],
    references: bool = False,
) -> None:
    """Write the state of the job and of every rank into ``folder``; a collective.

    ``groups``: ranks in each group whose coordinates stand in the names of parameters;
    ``references``: whether every rank has written those of deltas there, too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if needed(channels):
        _save_rank(folder, channels, loss_scale)
    if dist.get_rank() == 0:
        state = State(channels.step, loss_scale, dict(groups))
        (folder / STATE).write_text(json.dumps(asdict(state)) + "\n", encoding="utf-8")
        kinds = [checkpoint_note.RESIDUALS] if needed(channels) else []
        kinds += [checkpoint_note.PARAMETERS] if references else []
        world_size = dist.get_world_size()
        checkpoint_note.write(folder, channels.config, channels.step, world_size, kinds)
    dist.barrier()  # nobody may take the folder for whole before it is


def read_state(folder: Path) -> State | None:
    """The state of the job in ``folder``, read by rank 0; None where there is none. A collective.

    The step decides on codecs, so that one rank reads it, and no two can differ.
    """
    box: list[dict[str, Any] | None] = [None]
    path = folder / STATE
    if dist.get_rank() == 0 and path.is_file():
        box = [json.loads(path.read_text(encoding="utf-8"))]
    dist.broadcast_object_list(box, src=0)
    stored = box[0]
    if stored is None:
        return None
    return State(int(stored["step"]), float(stored["loss_scale"]), dict(stored["groups"]))


def _save_rank(folder: Path, channels: Channels, loss_scale: float) -> None:
    """Write what differs on this rank."""
    torch.save(
        {
            "format": FORMAT,
            "world_size": dist.get_world_size(),
            "layout": channels.layout,
            "loss_scale": loss_scale,
            "residuals": channels.residuals.state_dict(),
            "guard": channels.guard.state(),
            "link": channels.link.state(),
            "offload": channels.host.pace.state(),
            "factors": channels.factors.state_dict(),
        },
        _path(folder, dist.get_rank()),
    )


def load(folder: Path, channels: Channels, loss_scale: float) -> None:
    """Restore what the ranks saved; without such files the residuals start at zero, said once."""
    if channels.guard.watching:
        say(*channels.resume_guard(_told("guard", _path(folder, 0))))
    if channels.config.measured():
        say(*channels.resume_link(_told("link", _path(folder, 0))))
    if channels.config.offload.when == "auto":
        say(*channels.host.pace.restore(_told("offload", _path(folder, 0))))
    if not any(channel.error_feedback for channel in channels):
        say(*checkpoint_note.dropped(folder, channels.config))
        return
    first = _path(folder, 0)
    if not first.is_file():
        say(f"{folder} holds no error-feedback residuals; they start at zero")
        return
    stored = _read(first)
    world_size = dist.get_world_size()
    if stored["world_size"] == world_size and stored.get("layout") == channels.layout:
        own = stored if dist.get_rank() == 0 else _read(_path(folder, dist.get_rank()))
        channels.residuals.load(own["residuals"])
        channels.factors.load(own.get("factors", {}))
    else:
        nodes = "" if stored.get("layout") == channels.layout else " on other nodes"
        count = stored["world_size"]
        say(f"residuals of {count} ranks{nodes} are summed and shared among {world_size}")
        channels.factors.load({})
        channels.residuals.load_sum(_states(folder, count, channels))
    channels.residuals.scale(loss_scale / stored["loss_scale"])
    if channels.link.holds_nothing("dp", channels.step) and channels.residuals.nbytes:
        channels.residuals.clear()
        say("dp is native now (when: auto): what error feedback still held is dropped")


def _states(folder: Path, count: int, channels: Channels) -> Iterator[Any]:
    """The residuals of every rank, one after the other; ``channels`` takes all right factors."""
    for rank in range(count):
        stored = _read(_path(folder, rank))
        channels.factors.warm |= stored.get("factors", {})
        yield stored["residuals"]


def _told(part: str, path: Path) -> dict[str, Any]:
    """What rank 0 reads there, told to all ranks: they change together or not at all."""
    state: list[dict[str, Any]] = [{}]
    if dist.get_rank() == 0 and path.is_file():
        state = [_read(path).get(part, {})]
    dist.broadcast_object_list(state, src=0)
    return state[0]


def _read(path: Path) -> dict[str, Any]:
    stored: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return stored
