"""Processes that run together: start, wait, end, what they wrote."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

#: seconds that the others may take to end after one rank failed, and that all may take to be killed
GRACE_S = 5.0
TIMED_OUT = 124  # the exit status of a rank that ran out of time, as of timeout(1)
#: exit status of a rank that was ended because another one failed
STOPPED = 125


class Team:
    """Processes that run together."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self._lines: list[list[bytes]] = []
        self._began: list[float] = []
        self._ended: dict[int, float] = {}
        self._forced: dict[int, int] = {}

    def start(
        self,
        words: Sequence[str],
        enter: Callable[[], None],
        env: Mapping[str, str],
        cwd: str | Path | None,
        prefix: str | None,
    ) -> None:
        """Start one; ``prefix`` stands before its lines on the terminal, None shows nothing."""
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
            preexec_fn=enter,
        )
        self._processes.append(process)
        self._began.append(time.monotonic())
        lines: list[bytes] = []
        self._lines.append(lines)
        assert process.stdout is not None
        reader = threading.Thread(target=_read, args=(process.stdout, lines, prefix), daemon=True)
        self._readers.append(reader)
        reader.start()

    def wait(self, timeout: float, grace: float = GRACE_S) -> None:
        """Wait until all have ended, one failed ``grace`` ago, or ``timeout`` seconds are over."""
        deadline, forced = time.monotonic() + timeout, TIMED_OUT
        while len(self._ended) < len(self._processes) and time.monotonic() < deadline:
            for index, process in enumerate(self._processes):
                if index not in self._ended and process.poll() is not None:
                    self._ended[index] = time.monotonic()
                    if process.returncode and forced == TIMED_OUT:
                        deadline = min(deadline, time.monotonic() + grace)
                        forced = STOPPED
            time.sleep(0.01)
        for index in range(len(self._processes)):
            if index not in self._ended:
                self._forced[index] = forced

    @property
    def any_ended(self) -> bool:
        """Return whether a process has ended, well or not."""
        return any(process.poll() is not None for process in self._processes)

    def pause(self) -> None:
        """Stop all that run, with their threads, until ``resume``; returns when they have."""
        self._signal(signal.SIGSTOP)
        for process in self._processes:
            if process.poll() is None:
                os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Let all go on that ``pause`` stopped."""
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """Kill what still runs, with all that it started, and collect the output."""
        self._signal(signal.SIGKILL)
        for index, process in enumerate(self._processes):
            process.wait(GRACE_S)
            self._ended.setdefault(index, time.monotonic())
        for reader in self._readers:
            reader.join(GRACE_S)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)  # also what outlived its parent

    @property
    def statuses(self) -> list[int]:
        """By process; those that were killed by a signal as a shell would say it."""
        codes = [process.returncode for process in self._processes]
        plain = [code if code >= 0 else 128 - code for code in codes]
        return [self._forced.get(index, status) for index, status in enumerate(plain)]

    @property
    def seconds(self) -> list[float]:
        """Return the seconds that each process ran."""
        return [self._ended[index] - began for index, began in enumerate(self._began)]

    @property
    def texts(self) -> list[str]:
        """Return the output of each process."""
        return [b"".join(lines).decode(errors="replace") for lines in self._lines]


def _read(stream: IO[bytes], lines: list[bytes], prefix: str | None) -> None:
    with stream:
        for line in stream:
            lines.append(line)
            if prefix is not None:
                sys.stdout.write(prefix + line.decode(errors="replace"))
                sys.stdout.flush()
