"""Error-feedback residuals beside a DeepSpeed checkpoint: one file per rank.

They are no part of upstream's files: client_state is written by one rank only, residuals differ on
every rank. With another number of ranks, or other nodes under them, their sum is kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridcomp.channels import Channels

FORMAT = 1


def _path(folder: Path, rank: int) -> Path:
    return folder / f"hybridcomp_residuals_rank_{rank:05d}.pt"


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
        },
        _path(folder, dist.get_rank()),
    )


def load(folder: Path, channels: Channels, loss_scale: float) -> None:
    """Restore what ``save`` wrote; without such files the residuals start at zero, said once."""
    if not any(channel.error_feedback for channel in channels):
        return
    first = _path(folder, 0)
    if not first.is_file():
        _say(f"{folder} holds no error-feedback residuals; they start at zero")
        return
    stored = _read(first)
    world_size = dist.get_world_size()
    if stored["world_size"] == world_size and stored.get("layout") == channels.layout:
        own = stored if dist.get_rank() == 0 else _read(_path(folder, dist.get_rank()))
        channels.residuals.load(own["residuals"])
    else:
        nodes = "" if stored.get("layout") == channels.layout else " on other nodes"
        _say(
            f"residuals of {stored['world_size']} ranks{nodes} are summed and shared among "
            f"{world_size}"
        )
        paths = (_path(folder, rank) for rank in range(stored["world_size"]))
        channels.residuals.load_sum(_read(path)["residuals"] for path in paths)
    channels.residuals.scale(loss_scale / stored["loss_scale"])


def _read(path: Path) -> dict[str, Any]:
    stored: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return stored


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"[hybridcomp] {text}", flush=True)
