"""Error-feedback residuals and the guard beside a DeepSpeed checkpoint: one file per rank.

They are no part of upstream's files: client_state is written by one rank only, residuals differ on
every rank. With another number of ranks, or other nodes under them, their sum is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridcomp.channels import checkpoint_note
from hybridcomp.channels.engine_channels import Channels

FORMAT = 1


def _path(folder: Path, rank: int) -> Path:
    return folder / f"{checkpoint_note.RESIDUALS}_rank_{rank:05d}.pt"


def needed(channels: Channels) -> bool:
    """Whether there is anything to save; equal on every rank."""
    known = bool(channels.guard.trips) or bool(channels.link.verdicts)
    known = known or bool(channels.host.pace.state())
    return known or any(channel.error_feedback for channel in channels)


def save(folder: Path, channels: Channels, loss_scale: float) -> None:
    """Write this rank's residuals into the checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
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


def note(folder: Path, channels: Channels, references: bool = False) -> None:
    """Write on rank 0 what the checkpoint holds; ``references``: those of deltas, too."""
    if dist.get_rank() == 0:
        kinds = [checkpoint_note.RESIDUALS] if needed(channels) else []
        kinds += [checkpoint_note.PARAMETERS] if references else []
        world_size = dist.get_world_size()
        checkpoint_note.write(folder, channels.config, channels.step, world_size, kinds)


def load(folder: Path, channels: Channels, loss_scale: float) -> None:
    """Restore what ``save`` wrote; without such files the residuals start at zero, said once."""
    if channels.guard.watching:
        say(channels.resume_guard(_told("guard", _path(folder, 0))))
    if channels.config.measured():
        say(channels.resume_link(_told("link", _path(folder, 0))))
    if channels.config.offload.when == "auto":
        say(channels.host.pace.restore(_told("offload", _path(folder, 0))))
    if not any(channel.error_feedback for channel in channels):
        say(checkpoint_note.dropped(folder, channels.config))
        return
    first = _path(folder, 0)
    if not first.is_file():
        say([f"{folder} holds no error-feedback residuals; they start at zero"])
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
        say([f"residuals of {count} ranks{nodes} are summed and shared among {world_size}"])
        channels.factors.load({})
        channels.residuals.load_sum(_states(folder, count, channels))
    channels.residuals.scale(loss_scale / stored["loss_scale"])
    if channels.link.holds_nothing("dp", channels.step) and channels.residuals.nbytes:
        channels.residuals.clear()
        say(["dp is native now (when: auto): what error feedback still held is dropped"])


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


def say(texts: Sequence[str]) -> None:
    """Tell the user, on rank 0."""
    for text in texts if dist.get_rank() == 0 else ():
        print(f"[hybridcomp] {text}", flush=True)
