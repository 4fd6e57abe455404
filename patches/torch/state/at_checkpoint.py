"""Load an attached model's state from a folder that any number of ranks wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridcomp.channels.checkpoint.resharing import share
from hybridcomp.job import saved
from hybridcomp.patches.torch.state.stateful import WithState, entry


class AtCheckpoint:
    """``Stateful`` that loads a model's state from ``folder``, written by any number of ranks."""

    def __init__(self, attached: WithState, folder: str | Path, prefix: str = "hybridcomp") -> None:
        """Read the list of entries; every rank calls it, as collectives follow.

        ``prefix``: the key of the state in the checkpoint. Raises CheckpointError on every rank
        if any rank cannot read the checkpoint's metadata.
        """
        self._attached = attached
        keys, problem = saved.attempt(lambda: _keys_of(folder, prefix))
        saved.all_well(problem, f"reading what the checkpoint {str(folder)!r} holds")
        self._keys = keys or []

    def state_dict(self) -> dict[str, Any]:
        """Return placeholders for the entries that this rank loads; {} if there are none."""
        return {entry(rank): b"" for rank in share(len(self._keys))} if self._keys else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the entries."""
        self._attached.load_state_dict(state)


def _keys_of(folder: str | Path, prefix: str) -> list[str]:
    """Return the ranks' keys in the checkpoint ``folder``."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    known = FileSystemReader(folder).read_metadata().state_dict_metadata
    start = f"{prefix}.rank_"
    return sorted(key for key in known if key.startswith(start))
