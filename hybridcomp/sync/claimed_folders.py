"""Keep islands that are jobs from writing into one checkpoint folder: they use the same names."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from pathlib import Path

import torch.distributed as dist

from hybridcomp.errors import CheckpointError
from hybridcomp.job import saved
from hybridcomp.sync.stored import WHAT

FILE = "hybridcomp_sync_island.json"


def claim(folder: Path, run: str, island: str) -> None:
    """Say in ``folder`` that ``island`` of ``run`` writes there; a collective of the island.

    Raises CheckpointError, on every rank, where another island of the run has: each would overwrite
    what the other has saved. An earlier run's folder is taken.
    """
    problem = None
    if not dist.get_rank():
        _, problem = saved.attempt(functools.partial(_claim, folder, run, island))
    saved.all_well(problem, WHAT)


def _claim(folder: Path, run: str, island: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    own = {"format": saved.FORMAT, "run": run, "island": island}
    with contextlib.suppress(FileExistsError):  # of two at once one creates it
        with os.fdopen(os.open(path, saved.NEW_FILE, 0o666), "w", encoding="utf-8") as file:
            file.write(json.dumps(own) + "\n")
        return
    there = saved.read_json(path)
    if there.get("run") == run and there.get("island") != island:
        raise CheckpointError(
            f"{folder} has what island {there.get('island')} of this run has saved, and island "
            f"{island} would overwrite it; give each island a folder of its own"
        )
    saved.write_json(path, own)
