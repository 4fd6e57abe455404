"""Run trainings one after the other, and show the progress of each from its log."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from hybridcomp.escaping import one_line, parsed_json
from hybridcomp.tools.compare.json_lines import LOG
from hybridcomp.tools.progress import ProgressDisplay

#: name of the file with a training's stdout and stderr
OUTPUT = "output.txt"
#: bytes at the end of a log to search for its last record
LAST_NBYTES = 4096


class Trainable(Protocol):
    """One training that writes its log into a folder."""

    @property
    def folder(self) -> Path:
        """Return the folder of its files."""

    def run(
        self, watch: Callable[[float, Path], object] | None = None, every: float | None = None
    ) -> float | None:
        """Train; return the seconds, None if the training had finished before."""


class TrainingProgress:
    """Shows the progress of a command's trainings, which all take equally many steps."""

    def __init__(self, progress: ProgressDisplay) -> None:
        self._progress = progress
        # finished trainings; steps of a training, 0 until one has finished
        self._done, self._steps = 0, 0

    def run(self, job: Trainable, name: str) -> float | None:
        """Run the next training; return its seconds, None if it had finished before."""
        self._progress.show(self._done, f"{name}: training")
        try:
            seconds = job.run(lambda *told: self._look(name, *told), self._progress.every)
        finally:
            self._done += 1
        if seconds is None:
            self._progress.skip()
        self._steps = last_step(job.folder) or self._steps
        return seconds

    def _look(self, name: str, seconds: float, folder: Path) -> None:
        share = min(1.0, last_step(folder) / self._steps) if self._steps else 0.0
        text = f"{name}: {seconds:.0f} s, {last_line(folder) or 'nothing logged yet'}"
        self._progress.show(self._done + share, text)


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
