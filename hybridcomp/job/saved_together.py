"""Replace the files of all ranks, or none: what one rank cannot write leaves all as they were.

Each rank writes its new files beside the old ones (``saved.write``). Once all ranks have, they get
their names, and the old ones wait under another until that is done on all ranks, too.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from hybridcomp.errors import CheckpointError
from hybridcomp.job import gates, saved
from hybridcomp.job.together import together

#: errors of ``link`` where there is no old file, or no second name on this file system
_NO_LINK = (errno.ENOENT, errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


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
    saved.waiting.append(files)
    try:
        with together(what, lambda: _put_back(files), error=CheckpointError):
            yield
            gates.gate()
            for one in files:
                _keep_old(one.path)
                one.rename()
    finally:
        saved.waiting.clear()
    for one in files:
        _old(one.path).unlink(missing_ok=True)


def _old(path: Path) -> Path:
    return path.with_name(f"{path.name}.old")


def _keep_old(path: Path) -> None:
    """Give ``path`` a second name, if it is there and its file system has such."""
    _old(path).unlink(missing_ok=True)
    try:
        os.link(path, _old(path))
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise


def _put_back(files: list[saved.NewFile]) -> None:
    for one in files:
        with contextlib.suppress(OSError):
            if one.part is not None:
                one.part.unlink(missing_ok=True)
            if _old(one.path).exists():
                os.replace(_old(one.path), one.path)
            elif one.is_named and not one.had_old:
                one.path.unlink(missing_ok=True)
