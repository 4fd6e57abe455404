"""Create a folder in the temporary directory that only this user can write: its files are run."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path


def private_folder(name: str) -> Path:
    """Create or reuse this user's folder ``name``, with mode 0700.

    Another user could create that name in the shared directory first. Raises PermissionError if it
    is a link, not a folder, owned by another user, or writable by others.
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
