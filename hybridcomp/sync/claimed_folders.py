"""Keep two islands from writing checkpoints or versions of the same name into one folder."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from hybridcomp.errors import CheckpointError
from hybridcomp.job import saved
from hybridcomp.job.waits import awaited
from hybridcomp.sync.store_line import StoreLine

#: with the run in the place of ``*``: each run claims for itself, so that one of two at once does
FILES = "hybridcomp_sync_island_*.json"
#: seconds that whoever has just claimed a folder takes to say who it is
WRITING_S = 5.0


def claim(folder: Path, run: str, island: str) -> None:
    """Say in ``folder`` that ``island`` of ``run`` writes there; every rank may, and alone.

    Raises CheckpointError where another island of the run has: each would overwrite what the other
    has saved; and where nothing can be written. An earlier run's folder is taken, and one whose
    claim is empty: who made that ended before saying who it was.
    """
    path = folder / FILES.replace("*", run)
    try:
        _check(folder, first_in(folder, FILES, run, island), island)
    except OSError as error:
        raise saved.unwritten(path, error) from error


def first_in(folder: Path, files: str, run: str, island: str) -> str:
    """Return the first island of ``run`` that has claimed ``folder``, which may be ``island`` now.

    ``files``: names of what claims, with ``*`` for the run. Raises OSError, and CheckpointError
    where such a file is damaged.
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
    """Create a file; return False, and write nothing, if it exists."""
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
    """Say at the rendezvous that ``island`` writes to ``url``, which is one for all islands.

    Raises CheckpointError as ``claim``, PeerError where the rendezvous does not answer.
    """
    _check(url, line.first(f"saves/{url}", island).decode(), island)


def _check(where: Path | str, holder: str, island: str) -> None:
    if holder != island:
        raise CheckpointError(
            f"{where} has what island {holder} of this run has saved, and island {island} would "
            "overwrite it; give each island a folder of its own, and an island that comes again "
            "its name (sync.islands.name)"
        )
