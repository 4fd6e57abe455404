"""Read and write the file of a job's decisions, in a folder of the user's cache.

There is one file per job, named by a hash of the job's description. Files are written atomically,
so two jobs may write at once. Each write deletes files older than ``DAYS``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridcomp.autotune.verdicts import are_decisions
from hybridcomp.job.environment import CACHE

FORMAT = 1
#: days after which saved verdicts are ignored, since clusters and drivers change
DAYS = 30
DAY_S = 24 * 3600
#: name patterns of our files, of unfinished ones, and of tables of ``hybridcomp measure``
FILES, PARTS, LINKS = "verdicts-*.json", "verdicts-*.part", "links-*.json"


@dataclass(frozen=True)
class FoundVerdicts:
    """Saved verdicts of a job.

    Attributes:
        step_s: seconds of a step with these verdicts; 0: unknown.
        facts: for each dimension, a hash of its messages and of their links.
        verdicts: by dimension, in the form of ``Verdicts.state``.
        written: seconds since 1970.
    """

    step_s: float = 0.0
    facts: Mapping[str, str] = field(default_factory=dict)
    verdicts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    written: float = 0.0

    @property
    def day(self) -> str:
        return time.strftime("%d %b %Y", time.localtime(self.written))


def folder() -> Path | None:
    """Return the folder of the files: HYBRIDCOMP_CACHE, or in the user's cache; None if none."""
    named = os.environ.get(CACHE)
    if named is not None:
        return Path(named) if named else None
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base or Path.home() / ".cache") / "hybridcomp"
    except RuntimeError:  # the user has no home directory
        return None


def path_of(name: str) -> Path | None:
    """Return the file of the job with the hash ``name``; None if no folder is available."""
    here = folder()
    return None if here is None else here / FILES.replace("*", name)


def read(path: Path) -> FoundVerdicts | str | None:
    """Read saved verdicts (None: no file); also return why a file is unusable."""
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        return f"{path} cannot be read ({error})"
    if not _is_right(written):
        return f"{path} is damaged, or of another version"
    del written["format"]
    verdicts = FoundVerdicts(**written)
    if not _is_recent(verdicts.written):
        return f"{path} is of {verdicts.day}, and {DAYS} days are the limit"
    return verdicts


def write(path: Path, verdicts: FoundVerdicts) -> str:
    """Write verdicts, and delete old files beside them; return why that failed, or ""."""
    return write_text(
        path, json.dumps({"format": FORMAT, **vars(verdicts), "written": time.time()}, indent=1)
    )


def read_links(path: Path) -> Any:
    """Read the table of ``measured.write``; None: no file, not readable or too old."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return table if _is_recent(float(table["written"])) else None
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None


def _is_recent(written: float) -> bool:
    return 0 <= time.time() - written <= DAYS * DAY_S


def write_text(path: Path, text: str) -> str:
    """Write a file atomically, and delete old files beside it; return why that failed, or ""."""
    part = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        start, end = PARTS.split("*")
        handle, part = tempfile.mkstemp(end, start, path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(f"{text}\n")
        os.replace(part, path)
    except OSError as error:
        if part is not None:
            with contextlib.suppress(OSError):
                os.unlink(part)
        return str(error)
    _sweep(path.parent)
    return ""


def _sweep(here: Path) -> None:
    """Delete files of jobs that have not run for long, and unfinished files of killed jobs."""
    for pattern, days in ((FILES, DAYS), (LINKS, DAYS), (PARTS, 1)):
        for old in here.glob(pattern):
            with contextlib.suppress(OSError):  # another job may delete the same file
                if old.stat().st_mtime < time.time() - days * DAY_S:
                    old.unlink()


def _is_right(written: Any) -> bool:
    """Return whether ``written`` has the form that ``write`` writes."""
    names = {"format", *vars(FoundVerdicts())}
    return (
        isinstance(written, dict)
        and set(written) == names
        and written["format"] == FORMAT
        and all(map(_is_seconds, (written["step_s"], written["written"])))
        and isinstance(written["facts"], dict)
        and are_decisions(written["verdicts"])
        and set(written["facts"]) == set(written["verdicts"])
        and all(isinstance(value, str) for value in written["facts"].values())
        and all(
            isinstance(verdict["pays"], bool) and all(map(math.isfinite, numbers))
            for verdict in written["verdicts"].values()
            if (numbers := [value for value in verdict.values() if value is not None])
        )
    )


def _is_seconds(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < math.inf
