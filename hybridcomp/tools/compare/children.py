"""Run child processes as a group, and end the whole group with the process that started it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from hybridcomp.tools.progress import LINE_S

#: seconds that a launcher and its ranks get to end: torch's launcher gives its ranks 30 s
FAREWELL_S = 40.0
#: seconds between two looks at whether a child has ended
LOOK_S = 0.05


def run_logged(
    command: Sequence[str],
    output: Path,
    environment: Mapping[str, str],
    farewell: float = FAREWELL_S,
    look: Callable[[], object] | None = None,
    every: float | None = None,
) -> int:
    """Run ``command`` as a new process group, and return its exit status.

    If this process gets SIGINT or SIGTERM meanwhile, the group gets SIGTERM, then SIGKILL.

    Args:
        command: words.
        output: file for its stdout and stderr; overwritten.
        environment: variables added to those of this process.
        farewell: most seconds between the two signals.
        look: called every ``every`` seconds; if it raises, the group is ended.
        every: seconds between two calls of ``look``; None: ``LINE_S``.
    """
    with output.open("w") as log, _sigterm_raises():
        process = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env={**os.environ, **environment}, start_new_session=True,
        )  # fmt: skip
        try:
            while (status := _status(process, every or LINE_S)) is None:
                if look is not None:
                    look()
            return status
        except BaseException:
            end(process, farewell)
            raise


def _status(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Return the exit status of ``process``; None if it still runs after ``seconds``."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def end(process: subprocess.Popen[bytes], farewell: float = FAREWELL_S) -> None:
    """End the group that ``process`` leads: SIGTERM, after ``farewell`` seconds SIGKILL."""
    deadline = time.monotonic() + farewell
    try:
        _signal(process, signal.SIGTERM)
        while _lives(process) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
    finally:  # also when a second signal arrives
        _signal(process, signal.SIGKILL)
        process.wait()


def _lives(process: subprocess.Popen[bytes]) -> bool:
    """Return whether any process of the group still runs; a launcher may exit before its ranks."""
    process.poll()  # reap it, or it stays a zombie
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Raise SystemExit on SIGTERM while the context is open, so that cleanups run."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals in the main thread only
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
