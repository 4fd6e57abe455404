"""Start, watch and end processes that run together, and collect their output."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

#: seconds in which the others may end after a rank has failed, and killed ones have to
GRACE_S = 5.0
#: exit statuses: of a rank that ran out of time, as of timeout(1), and of one that was ended after
#: another had failed
TIMED_OUT, STOPPED = 124, 125


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
        enter: Callable[[], None] | None,
        env: Mapping[str, str],
        prefix: str | None,
    ) -> None:
        """Start a process.

        ``enter``: called in the child before its program. ``prefix``: stands before its lines on
        the terminal; None shows nothing.
        """
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(env),
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

    def wait(self, timeout: float, grace: float | None = None) -> None:
        """Wait until all have ended, or ``grace`` s after a failure, or for ``timeout`` s."""
        grace = GRACE_S if grace is None else grace
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
        """Stop all running processes until ``resume``; return when all their threads stand."""
        self._signal(signal.SIGSTOP)
        for process in self._processes:
            if process.poll() is None:
                os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Continue the processes that ``pause`` stopped."""
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """Kill running processes and their children, and collect the output."""
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
        """Return the exit status of each process; 128 + the signal of a killed one."""
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


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Raise SystemExit on SIGTERM and SIGHUP in the body, so that its cleanups run.

    Python handles signals in the main thread only; elsewhere it does nothing.
    """

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _read(stream: IO[bytes], lines: list[bytes], prefix: str | None) -> None:
    with stream:
        for line in stream:
            lines.append(line)
            if prefix is not None:
                sys.stdout.write(prefix + line.decode(errors="replace"))
                sys.stdout.flush()
