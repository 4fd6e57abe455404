"""A folder beside temporary files that nobody else writes: what is built there is run."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path


def private_folder(name: str) -> Path:
    """Make, or find again, the folder of this user of that ``name``, with mode 0700.

    Anybody may make a folder of a known name in a shared one, before its owner does. Raises
    PermissionError where it is a link or no folder, another user's, or open to others.
    """
    folder = Path(tempfile.gettempdir(), f"{name}-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{folder}: expected a folder of user {os.getuid()} that no other may enter (mode "
            f"0700), found {stat.filemode(found.st_mode)} of user {found.st_uid}; remove it, or "
            "set TMPDIR to a folder of your own"
        )
    return folder
