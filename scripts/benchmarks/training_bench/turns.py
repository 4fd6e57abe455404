"""Let several running jobs step one at a time: the controller's and the ranks' ends.

The machine's speed drifts within minutes (here by a third and more), which would distort trainings
that run one after the other. Alternating steps keeps the compared steps close in time.

Waiting jobs are stopped (SIGSTOP), since each gloo process group has a thread that wakes 100 times
a second. A rank of three dimensions has 70 of them; six such waiting trainings kept both cores
busy.
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

#: a rank with this variable waits before each step for the benchmark's signal
VARIABLE = "TRAINING_BENCH_TURNS"
GO = b"go"
MESSAGE_NBYTES = 4096
#: seconds between resuming a job and its turn, so that its threads' wake-up is not timed
WAKE_S = 0.02
LOOK_S = 0.2  # interval of checks that the other side is alive


class Seat:
    """A rank's connection to the benchmark, found through the rank's environment variables."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(os.environ[VARIABLE])
        self._socket.sendall(os.environ["RANK"].encode())

    def wait(self, step: dict[str, float]) -> None:
        """Report the last step (``{}``: none yet) and wait for this job's turn.

        Raises SystemExit if the benchmark has ended.
        """
        self._socket.sendall(json.dumps(step).encode())
        if self._socket.recv(len(GO)) != GO:
            raise SystemExit("RuntimeError: the bench ended before this training did")


class Job:
    """The benchmark's end of a training: all its ranks, which start with its first turn.

    The ranks are stopped during the turns of other jobs. ``over``: the training has ended,
    successfully or not.
    """

    def __init__(self, door: socket.socket, team: Team, ranks: int, timeout: float) -> None:
        self._team, self._timeout = team, timeout
        #: each rank's reports of its steps so far
        self.said: list[list[dict[str, float]]] = [[] for _ in range(ranks)]
        deadline, seats = time.monotonic() + timeout, dict[int, socket.socket]()
        while len(seats) < ranks:
            seat = self._until(lambda: door.accept()[0], deadline)
            if seat is None:
                break
            seat.settimeout(LOOK_S)
            rank = self._until(functools.partial(seat.recv, MESSAGE_NBYTES), deadline)
            if not rank:  # b"": the rank ended
                break
            seats[int(rank)] = seat
        self._seats = [seats[rank] for rank in sorted(seats)]
        self.over = len(self._seats) < ranks or not self._ready()
        self._rest()

    def step(self) -> None:
        """Let all ranks make a step; return when all wait for the next or one has ended."""
        if self.over:
            return
        self._team.resume()
        time.sleep(WAKE_S)
        try:
            for seat in self._seats:
                seat.sendall(GO)
        except OSError:  # it ended during another job's turn
            self.over = True
        else:
            self.over = not self._ready()
            self._rest()

    def close(self) -> None:
        """Disconnect: ranks that wait for a turn end with an error."""
        for seat in self._seats:
            seat.close()
        self._team.resume()

    def _rest(self) -> None:
        if not self.over:  # ranks of a failed job still have to end
            self._team.pause()

    def _ready(self) -> bool:
        deadline = time.monotonic() + self._timeout
        receive = [functools.partial(seat.recv, MESSAGE_NBYTES) for seat in self._seats]
        said = [self._until(call, deadline) for call in receive]
        if not all(said):  # b"": a closed connection
            return False
        for steps, message in zip(self.said, said, strict=True):
            steps += [step] if (step := json.loads(message)) else []
        return True

    def _until(self, call: Callable[[], Any], deadline: float) -> Any:
        """Return the result of ``call``, or None if a rank ends or time runs out first."""
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
    """Open a socket for the ranks; return it and its path, the value of ``VARIABLE``."""
    path = str(Path(folder, "turns"))
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    found.bind(path)
    found.listen(256)
    found.settimeout(LOOK_S)
    return found, path
