"""Jobs side by side, of which one at a time makes a step: both ends of what tells them so.

A machine's speed changes by the minute (measured here: by a third and more), and trainings one
after the other are compared at different speeds. Side by side, a step of one is a moment away from
the same step of every other one.

Jobs that wait are stopped (SIGSTOP): each process group of gloo has a thread that wakes 100 times a
second. A rank of three dimensions has 70 of them; six such trainings that only waited kept both
cores of a machine busy.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.team import Team

#: a rank with this variable waits before each step until the bench says go
VARIABLE = "TRAINING_BENCH_TURNS"
GO = b"go"
MESSAGE_NBYTES = 4096
#: between waking a job and its turn, so that what its threads do first is not timed
WAKE_S = 0.02
LOOK_S = 0.2  # how often a wait looks whether the other side is still there


class Seat:
    """A rank's end."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(path)

    def wait(self, step: dict[str, float]) -> None:
        """Say that the next step may begin, and what the last one took (``{}``: there was none).

        Returns when it is this job's turn. Raises SystemExit when the bench has ended.
        """
        self._socket.sendall(json.dumps(step).encode())
        if self._socket.recv(len(GO)) != GO:
            raise SystemExit("RuntimeError: the bench ended before this training did")


@functools.cache
def own_seat() -> Seat | None:
    """Return the seat of this rank; None where nobody gives turns."""
    path = os.environ.get(VARIABLE)
    return None if path is None else Seat(path)


class Job:
    """The bench's end: all ranks of a training, which begins with its first turn.

    Stopped while others have theirs. ``over``: it has ended, well or not.
    """

    def __init__(self, door: socket.socket, team: Team, ranks: int, timeout: float) -> None:
        self._door, self._team, self._timeout = door, team, timeout
        self._seats: list[socket.socket] = []
        #: what each rank said of its steps so far
        self.said: list[list[dict[str, float]]] = [[] for _ in range(ranks)]
        deadline = time.monotonic() + timeout
        while len(self._seats) < ranks:
            seat = self._until(lambda: door.accept()[0], deadline)
            if seat is None:
                break
            seat.settimeout(LOOK_S)
            self._seats.append(seat)
        self.over = len(self._seats) < ranks or not self._ready()
        self._rest()

    def step(self) -> None:
        """Let all ranks make a step; returns when all wait for the next one, or one has ended."""
        if self.over:
            return
        self._team.resume()
        time.sleep(WAKE_S)
        try:
            for seat in self._seats:
                seat.sendall(GO)
        except OSError:  # it ended while others had their turn
            self.over = True
        else:
            self.over = not self._ready()
            self._rest()

    def close(self) -> None:
        """Hang up: ranks that wait for a turn end with an error."""
        for seat in self._seats:
            seat.close()
        self._team.resume()

    def _rest(self) -> None:
        if not self.over:  # ranks of a failed one still have to end
            self._team.pause()

    def _ready(self) -> bool:
        deadline = time.monotonic() + self._timeout
        receive = [functools.partial(seat.recv, MESSAGE_NBYTES) for seat in self._seats]
        said = [self._until(call, deadline) for call in receive]
        if not all(said):  # a closed connection: b""
            return False
        for steps, message in zip(self.said, said, strict=True):
            steps += [step] if (step := json.loads(message)) else []
        return True

    def _until(self, call: Callable[[], Any], deadline: float) -> Any:
        """Return the result of ``call``, None where a rank ended or time is up before it."""
        while True:
            ended = self._team.any_ended
            try:
                return call()
            except TimeoutError:
                if ended or time.monotonic() > deadline:
                    return None
            except OSError:
                return None


def door(folder: str) -> tuple[socket.socket, str]:
    """Open a socket that ranks come to, and its path for ``VARIABLE``."""
    path = str(Path(folder, "turns"))
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    found.bind(path)
    found.listen(256)
    found.settimeout(LOOK_S)
    return found, path
