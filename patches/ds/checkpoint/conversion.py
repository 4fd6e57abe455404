"""Convert a checkpoint with DeepSpeed's ``ds_to_universal``, in a separate process.

The result is renamed into place once it is complete. A lock beside the checkpoint keeps two jobs,
or a job and a converter left by an earlier start, from writing at once; the converter inherits the
lock, so that it is held until the last of them ends.
"""

from __future__ import annotations

import fcntl
import filecmp
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from hybridcomp.channels.checkpoint import checkpoint_note
from hybridcomp.elastic.checkpoints import SavedJob
from hybridcomp.errors import CheckpointError
from hybridcomp.job.waits import unsaid
from hybridcomp.log import say

WHAT = "converting a checkpoint for other ranks"
CONVERTER = "deepspeed.checkpoint.ds_to_universal"
#: seconds between two polls of the converter, and between two signs of life to other ranks
LOOK_S, BEAT_S = 0.2, 5.0


def convert(job: SavedJob, beat: Callable[[], object] = unsaid) -> Path:
    """Return the universal checkpoint ``TAG_universal`` of ``job``, converting it if needed.

    ``beat`` is called from time to time meanwhile. Raises CheckpointError, with nothing changed, if
    DeepSpeed cannot convert it.
    """
    target = job.folder.with_name(f"{job.folder.name}_universal")
    with target.with_name(f"{target.name}.lock").open("w") as lock:
        _wait(lambda: _locked(lock), beat)
        if not _is_of(target, job):
            say(f"{WHAT}: {target.name}, beside {job.folder}")
            _make(job, target, lock, beat)
        _replace_text(target.with_name(checkpoint_note.LATEST_UNIVERSAL), target.name)
    return target


def _is_of(target: Path, job: SavedJob) -> bool:
    """Return whether ``target`` was made from this save, whose model states upstream copies
    last.
    """
    states = [name for name in job.files if "mp_rank" in name and name.endswith("model_states.pt")]
    pairs = [(job.folder / name, target / name) for name in states]
    return all(copy.is_file() and filecmp.cmp(one, copy) for one, copy in pairs)


def _make(job: SavedJob, target: Path, lock: IO[str], beat: Callable[[], object]) -> None:
    """Convert into a folder beside ``target`` and move it into place."""
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    source = part / job.folder.name
    source.mkdir(parents=True)
    for name in job.files:  # leave out files of an earlier save on more ranks
        (source / name).symlink_to((job.folder / name).resolve())
    words = [sys.executable, "-m", CONVERTER, "--inject_missing_state",
             "--input_folder", str(source), "--output_folder", str(part / target.name)]  # fmt: skip
    log = part / "converter.log"
    with log.open("wb") as output:
        child = subprocess.Popen(
            words, stdout=output, stderr=output, stdin=subprocess.DEVNULL,
            pass_fds=[lock.fileno()],
        )  # fmt: skip
        try:
            _wait(lambda: child.poll() is not None, beat)
        except BaseException:
            child.kill()
            raise
    if child.returncode or not _is_of(part / target.name, job):
        lines = log.read_text(errors="backslashreplace").strip().splitlines()
        said = lines[-1][:300] if lines else f"it ended with status {child.returncode}"
        shutil.rmtree(part, ignore_errors=True)
        raise CheckpointError(f"DeepSpeed cannot convert {job.folder}: {said}")
    if target.exists():  # from an earlier save of the same name
        target.rename(part / "earlier")
    (part / target.name).rename(target)
    shutil.rmtree(part, ignore_errors=True)


def _locked(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait(done: Callable[[], bool], beat: Callable[[], object]) -> None:
    last = time.monotonic()
    while not done():
        time.sleep(LOOK_S)
        if time.monotonic() - last >= BEAT_S:
            beat()
            last = time.monotonic()


def _replace_text(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    os.replace(part, path)
