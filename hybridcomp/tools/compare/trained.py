"""Read how far a running training is, from its log and its output."""

from __future__ import annotations

import os
from pathlib import Path

from hybridcomp.escaping import one_line, parsed_json
from hybridcomp.tools.compare.json_lines import LOG

#: name of the file with a training's stdout and stderr
OUTPUT = "output.txt"
#: bytes at the end of a log to search for its last record
LAST_NBYTES = 4096


def last_line(folder: Path) -> str:
    """Return the last step in a training's log, else the script's last line, else ""."""
    for line in _ends(folder / LOG):
        if found := _record(line):
            return f"step {found[0]}, loss {found[1]:.4g}"
    return next((text for line in _ends(folder / OUTPUT) if (text := one_line(line))), "")


def last_step(folder: Path) -> int:
    """Return the number of the last step in a training's log, 0 if there is none."""
    return next((found[0] for line in _ends(folder / LOG) if (found := _record(line))), 0)


def _ends(path: Path) -> list[str]:
    """Return the last lines of a file, the last one first; none if the file does not exist."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - LAST_NBYTES))
            return file.read().decode("utf-8", "replace").splitlines()[::-1]
    except OSError:
        return []


def _record(line: str) -> tuple[int, float] | None:
    """Return step and loss of a record; None for any other line."""
    try:
        record = parsed_json(line)
        return int(record["step"]), float(record["loss"])
    except (ValueError, KeyError, TypeError):
        return None
