"""A checkpoint after three steps, and a run resumed from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hybridcomp
from hybridcomp.channels import Channels
from hybridcomp.channels.checkpoint import save_load as checkpoint
from hybridcomp.channels.residuals.pieces import Piece
from hybridcomp.config import CompressionConfig
from hybridcomp.session import process
from tests.channels import sent
from tests.digests.made import sha, values

BLOCK: dict[str, Any] = {
    "dp": {"codec": "blockint", "bits": 4, "error_feedback": True, "guard": {"error": 0.9}},
    "min_bytes": 0,
}
NUMEL = 700
SCALE = 4.0


def _steps(channels: Channels, first: int, count: int) -> list[str]:
    """Return digests of the sums of ``count`` steps on this rank."""
    found, channel = [], channels["dp"]
    for step in range(first, first + count):
        gradient = values(NUMEL, torch.float32, 100 * step + dist.get_rank())
        codec = channel.codec(NUMEL, gradient.dtype, None)
        assert codec is not None
        pieces = [Piece("a", 0, 300), Piece("b", 0, NUMEL - 300)]
        sent.all_reduce(channel, gradient, codec, None, pieces=pieces).wait()
        found.append(sha(gradient))
        channels.step += 1
    return found


def write(folder: str) -> list[str]:
    """Run three steps, save, and return the digests of two more steps."""
    channels = Channels(CompressionConfig.parse(BLOCK))
    _steps(channels, 0, 3)
    checkpoint.save(Path(folder), channels, SCALE, {})
    return _steps(channels, 3, 2)


def go_on(folder: str, scale: float = SCALE) -> tuple[list[str], float]:
    """Return the digests of two steps after that checkpoint, and the restored residuals' norm."""
    channels = Channels(CompressionConfig.parse(BLOCK))
    checkpoint.load(Path(folder), channels, scale)
    norm = channels.residuals.norm()
    channels.step = 3
    return _steps(channels, 3, 2), norm


def by_call(folder: str) -> tuple[int, float]:
    """Return step and norm of the residuals after ``hybridcomp.load_state``."""
    hybridcomp.install(BLOCK)
    hybridcomp.load_state(folder)
    channels = process.current()
    assert channels is not None
    return channels.step, channels.residuals.norm()
