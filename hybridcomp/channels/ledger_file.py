"""The ledger on disk: a record a line, whatever becomes of the run or of the disk."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def set_aside(path: Path) -> None:
    """Give the file of an earlier run another name: a run that is resumed by the same command must
    not wipe out the figures of the run before. ``ledger.jsonl`` becomes ``ledger.1.jsonl``.
    """
    if path.is_file() and path.stat().st_size:
        names = (path.with_name(f"{path.stem}.{n}{path.suffix}") for n in itertools.count(1))
        path.rename(next(name for name in names if not name.exists()))


class JsonLines:
    """One JSON object per line, written at once, so that a killed run keeps its figures.

    Where the disk is full records are dropped, not the run: that is said once, and the file holds
    whole lines only, in front of and behind what is missing.
    """

    def __init__(self, path: Path) -> None:
        set_aside(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._file = path, path.open("wb", buffering=0)
        self._nbytes, self._dropped = 0, 0

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record."""
        text = (json.dumps(record) + "\n").encode()
        try:
            written = self._file.write(text)
            if written != len(text):
                raise OSError(f"{written} of {len(text)} bytes were written")
            self._nbytes += len(text)
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        """Take back what was written of a line."""
        with contextlib.suppress(OSError):
            self._file.truncate(self._nbytes)
            self._file.seek(self._nbytes)
        self._dropped += 1
        if self._dropped == 1:
            print(
                f"[hybridcomp] {self._path}: a record cannot be written ({error}); the run goes on "
                "without it",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        if self._dropped > 1:
            print(
                f"[hybridcomp] {self._path}: {self._dropped} records are missing", file=sys.stderr
            )
        self._dropped = 0
