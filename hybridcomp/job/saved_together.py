"""Replace the files of all ranks, or none: what one rank cannot write leaves all as they were.

Each rank writes its new files beside the old ones (``saved.write``). Once all ranks have, they get
their names, and the old ones wait under another until that is done on all ranks, too.
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

#: errors of ``link`` on file systems where a file has one name
_NO_LINK = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


@contextlib.contextmanager
def files_together(what: str) -> Iterator[None]:
    """Give the files that the body writes and removes their names at its end; all ranks enter.

    One inside of another is a part of it. Raises CheckpointError on every rank, with all files as
    they were, where one fails.
    """
    if saved.waiting:
        yield
        return
    files: list[saved.NewFile] = []
    kept: list[Path] = []  # old files that have a second name
    saved.waiting.append(files)
    try:
        with together(what, lambda: _put_back(files, kept), error=CheckpointError):
            yield
            gates.gate()
            for one in files:
                if _has_second_name(one.path):
                    kept.append(one.path)
                one.rename()
    finally:
        saved.waiting.clear()
    for path in kept:
        with contextlib.suppress(OSError):  # it harms nobody
            _old(path).unlink(missing_ok=True)


def _old(path: Path) -> Path:
    return path.with_name(f"{path.name}.old")


def _has_second_name(path: Path) -> bool:
    """Give ``path`` a second name, or a copy where the file system has none; False: not there."""
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
    for one in files:
        with contextlib.suppress(OSError):
            if one.part is not None:
                one.part.unlink(missing_ok=True)
            if one.path in kept:
                os.replace(_old(one.path), one.path)
            elif one.is_named:
                one.path.unlink(missing_ok=True)
            _old(one.path).unlink(missing_ok=True)  # two names of one file are not replaced
