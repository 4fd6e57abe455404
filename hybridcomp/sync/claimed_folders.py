"""Prevent two islands from writing checkpoints or versions under equal names in one folder."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from hybridcomp.errors import CheckpointError
from hybridcomp.job import saved
from hybridcomp.job.waits import awaited
from hybridcomp.sync.store_line import StoreLine

#: pattern with the run in place of ``*``: each run has its own claim, so that two concurrent runs
#: cannot take each other's
FILES = "hybridcomp_sync_island_*.json"
#: seconds in which a rank that has just claimed a folder must write its island's name
WRITING_S = 5.0


def claim(folder: Path, run: str, island: str) -> None:
    """Claim ``folder`` for ``island`` of ``run``; every rank may call it alone.

    Raises CheckpointError if another island of the run has claimed the folder, since the two would
    overwrite each other's files, or if nothing can be written. A folder that an earlier run has
    claimed may be claimed, and so may one with an empty claim, whose creator died before naming
    itself.
    """
    path = folder / FILES.replace("*", run)
    try:
        _check(folder, first_in(folder, FILES, run, island), island)
    except OSError as error:
        raise saved.unwritten(path, error) from error


def first_in(folder: Path, files: str, run: str, island: str) -> str:
    """Claim ``folder`` for ``island`` unless claimed; return the island of ``run`` that has it.

    ``files``: name pattern of claims, with ``*`` for the run. Raises OSError, and CheckpointError
    if a claim is damaged.
    """
    path, holder = folder / files.replace("*", run), island
    folder.mkdir(parents=True, exist_ok=True)
    while not _create(path, json.dumps({"format": saved.FORMAT, "island": island}) + "\n"):
        if awaited(lambda: _nbytes(path) or None, WRITING_S):
            holder = str(saved.read_json(path).get("island"))
            break
        path.unlink(missing_ok=True)
    if holder == island:
        for other in set(folder.glob(files)) - {path}:
            other.unlink(missing_ok=True)
    return holder


def _create(path: Path, text: str) -> bool:
    """Create a file; if it exists, return False and write nothing."""
    try:
        descriptor = os.open(path, saved.NEW_FILE, 0o666)
    except FileExistsError:
        return False
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return True


def _nbytes(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def claim_url(url: str, line: StoreLine, island: str) -> None:
    """Claim ``url`` for ``island`` at the rendezvous; a URL is one place for all islands.

    Raises CheckpointError like ``claim``, PeerError if the rendezvous does not answer.
    """
    _check(url, line.first(f"saves/{url}", island).decode(), island)


def _check(where: Path | str, holder: str, island: str) -> None:
    if holder != island:
        raise CheckpointError(
            f"{where} has what island {holder} of this run has saved, and island {island} would "
            "overwrite it; give each island a folder of its own, and an island that comes again "
            "its name (sync.islands.name)"
        )
