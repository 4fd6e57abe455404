"""Libraries of C++ that tests compile once for all processes of a user, until a source changes.

Imports no torch, as a library may have to be loaded before it.
"""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path


def compiler() -> str | None:
    """Return the C++ compiler of this machine."""
    return shutil.which("g++") or shutil.which("clang++")


def library(name: str, made_of: bytes, arguments: Sequence[str]) -> Path:
    """Return the shared library ``name``, compiled with ``arguments`` if it is not there yet.

    ``made_of``: contents of its sources. A file lock lets only one process compile.
    """
    digest = hashlib.sha256(made_of + "\n".join(arguments).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"hybridcomp-built-{getpass.getuser()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder / f"{name}-{digest}.so"
    with found.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.is_file():
            partial = found.with_suffix(f".{os.getpid()}")
            command = [str(compiler()), "-fPIC", "-shared", *arguments, "-o", str(partial)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            partial.replace(found)
    return found
