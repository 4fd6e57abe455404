"""Replace the files of all ranks, or none: if one rank cannot write, all files stay as they were.

Each rank writes its new files next to the old ones (``saved.write``). Once all ranks have written,
each rank renames its new files to their final names; it keeps the old files under second names
until all ranks have renamed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from hybridcomp.errors import CheckpointError
from hybridcomp.job import gates, saved
from hybridcomp.job.together import together

#: errors of ``link`` on file systems without hard links
_NO_LINK = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


@contextlib.contextmanager
def files_together(what: str) -> Iterator[None]:
    """At the end of the body, rename the files that it wrote and delete those that it removed.

    All ranks enter. An inner context becomes part of the outer one. If any rank fails, raises
    CheckpointError on every rank and leaves all files as they were.
    """
    if saved.waiting:
        yield
        return
    files: list[saved.NewFile] = []
    kept: list[Path] = []  # second names of old files
    saved.waiting.append(files)
    try:
        with together(what, lambda: _put_back(files, kept), error=CheckpointError):
            yield
            gates.gate()
            for file in files:
                if _has_second_name(file.path):
                    kept.append(file.path)
                file.rename()
    finally:
        saved.waiting.clear()
    for path in kept:
        with contextlib.suppress(OSError):  # a leftover does no harm
            _old(path).unlink(missing_ok=True)


def _old(path: Path) -> Path:
    return path.with_name(f"{path.name}.old")


def _has_second_name(path: Path) -> bool:
    """Give ``path`` a second name by a hard link or a copy; return False if it is missing."""
    _old(path).unlink(missing_ok=True)
    try:
        os.link(path, _old(path))
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        shutil.copyfile(path, _old(path))
    return True


def _put_back(files: list[saved.NewFile], kept: list[Path]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            if file.part is not None:
                file.part.unlink(missing_ok=True)
            if file.path in kept:
                os.replace(_old(file.path), file.path)
            elif file.is_named:
                file.path.unlink(missing_ok=True)
            # ``replace`` does nothing if both names are the same file
            _old(file.path).unlink(missing_ok=True)
