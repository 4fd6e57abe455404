"""Write the ledger to disk, one JSON record per line; survives a killed run and a full disk."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hybridcomp.errors import ConfigError
from hybridcomp.escaping import strict_json
from hybridcomp.job.agreement import tell

#: flags of ``os.open`` for a ledger: truncated, since an earlier run's file was set aside
FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


def set_aside(path: Path) -> None:
    """Rename the file of an earlier run, so that a run resumed by the same command keeps its
    figures. ``ledger.jsonl`` becomes ``ledger.1.jsonl``. A link is renamed too, and its target
    stays unchanged: another user may have created it.
    """
    # a link to a device is kept
    is_link = path.is_symlink() and (path.is_file() or not path.exists())
    if is_link or (path.is_file() and path.stat().st_size):
        names = (path.with_name(f"{path.stem}.{n}{path.suffix}") for n in itertools.count(1))
        path.rename(next(name for name in names if not (name.exists() or name.is_symlink())))


def make_together(path: Path | None, key: str, ranks: Sequence[int] | None = None) -> None:
    """Make an empty ``path`` on rank 0; a collective that fails on all ranks or on none.

    A rank that failed alone would leave the others waiting in their next message. Raises
    ConfigError on every rank where the file cannot be written.

    Args:
        path: rank 0's path is used; other ranks may pass None.
        key: the setting that names the file.
        ranks: global ranks that call this, all of one model; None: all ranks.
    """
    problem = None
    if dist.get_rank() == 0 and path is not None:
        try:
            JsonLines(path).close()
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, "")
            reason = f"{name}: {error.strerror}" if name else str(error)
            problem = unwritable(path) or reason  # the first names the path that is in the way
    told = tell({"path": str(path), "problem": problem}, what="ledger's file", ranks=ranks)[0]
    if told["problem"] is not None:
        why = f"rank 0 cannot write it ({told['problem']}); {_TODO}"
        raise ConfigError(key, told["path"], why)


def unwritable(path: Path) -> str | None:
    """Return why this user cannot create or write ``path`` on this machine, None if possible.

    Creates nothing; missing folders are fine, since ``JsonLines`` creates them.
    """
    if path.is_dir():
        return os.strerror(errno.EISDIR)
    if path.exists():
        return None if os.access(path, os.W_OK) else f"{os.strerror(errno.EACCES)}: {path}"
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        return f"{os.strerror(errno.ENOTDIR)}: {folder}"
    mode = os.W_OK | os.X_OK
    return None if os.access(folder, mode) else f"{os.strerror(errno.EACCES)}: {folder}"


_TODO = "name a file in a folder that can be written, or leave it out"


class JsonLines:
    """Append JSON objects to a file, a line each, unbuffered: a killed run keeps its figures.

    On a full disk records are dropped and the run goes on: a message says so once, and the file
    holds complete lines only, before and after the dropped records.
    """

    def __init__(self, path: Path) -> None:
        set_aside(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        follow = path.exists() and not path.is_file()
        flags = FLAGS if follow else FLAGS | getattr(os, "O_NOFOLLOW", 0)
        self._path = path
        self._file = os.fdopen(os.open(path, flags, 0o666), "wb", buffering=0)
        self._nbytes, self._dropped = 0, 0

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record."""
        text = (strict_json(record) + "\n").encode()
        try:
            written = self._file.write(text)
            if written != len(text):
                raise OSError(f"{written} of {len(text)} bytes were written")
            self._nbytes += len(text)
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        """Cut off a partly written line and count the record as dropped."""
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
