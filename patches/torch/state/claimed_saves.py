"""Make torch.distributed.checkpoint refuse a folder into which another island's job has saved.

All jobs write files of the same names. The patch is on ``_FileSystemWriter.prepare_local_plan``,
not on ``save``, which callers import by name: every save and ``async_save`` in this process calls
this method before the first file, on each rank, and raises on all ranks what it raises on one.
Writers for object stores derive from ``_FileSystemWriter``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hybridcomp.patches.torch import torch_versions
from hybridcomp.patches.torch.state.stateful import WithState
from hybridcomp.seams.patching import Patch, Seam, apply_all, revert_all
from hybridcomp.sync import JobMeetings

PREPARE = Seam(
    torch_versions.DDP,
    "torch.distributed.checkpoint.filesystem",
    "_FileSystemWriter.prepare_local_plan",
    ("self", "plan"),
)

_attached: weakref.WeakSet[Any] = weakref.WeakSet()
_patches: list[Patch] = []


def follow(attached: Any) -> None:
    """Claim for ``attached``, until it is detached, each folder that this process saves into."""
    _attached.add(attached)
    attached.on_detach(functools.partial(_leave, attached))
    if not _patches:
        _patches.extend(apply_all([Patch(PREPARE, make_prepare)]))


def claim(where: Path | str, models: Iterable[WithState]) -> None:
    """Claim a folder or URL for the islands of ``models``; no collective.

    Raises CheckpointError if another island of the run has saved there.
    """
    for attached in models:
        for follower in attached.session.followers:
            if isinstance(follower, JobMeetings):
                follower.claim(where)


def make_prepare(original: Callable[..., Any]) -> Callable[..., Any]:
    """Claim the writer's folder before it writes a file."""

    @functools.wraps(original)
    def prepare_local_plan(self: Any, plan: Any) -> Any:
        where = str(self.path)
        claim(where if "://" in where else Path(where), list(_attached))
        return original(self, plan)

    return prepare_local_plan


def _leave(attached: Any) -> None:
    _attached.discard(attached)
    if not _attached:
        revert_all(_patches)
        _patches.clear()
