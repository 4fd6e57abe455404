"""Two checkouts that train in turns: the same steps, one beside the other, on one machine.

Both have their ranks up all the time and take turns of a few steps, in an order that is drawn for
every turn, so what the machine does besides hits both. A ratio is that of two turns side by side.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from bench.overhead.rank import ANSWER

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
RANKS, STEPS = 2, 10
KINDS = ("identity", "compressed", "small messages")
BUILD = 'from setuptools import setup; setup(script_args=["build_ext", "--inplace"])'


class Case(NamedTuple):
    """Timed case: a kind of ``rank.block_of`` at a stage of ZeRO, or ``codecs`` alone."""

    kind: str
    stage: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "codecs" else f"ZeRO-{self.stage} {self.kind}"


def cases(stages: Sequence[int]) -> list[Case]:
    """Return every kind at every stage, and what the codecs cost alone."""
    return [*(Case(kind, stage) for stage in stages for kind in KINDS), Case("codecs")]


@contextmanager
def checkout(of: str) -> Iterator[Path]:
    """Yield a folder with ``of``: itself, or a commit whose files are unpacked and built beside.

    Raises RuntimeError where git does not know it, or where its kernels cannot be built.
    """
    if Path(of, "hybridcomp").is_dir():
        yield Path(of).resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", of], cwd=ROOT, capture_output=True, check=False)
        if archive.returncode:
            raise RuntimeError(f"{of}: {archive.stderr.decode().strip()}")
        with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        done = subprocess.run(
            [sys.executable, "-c", BUILD], cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{of} cannot be built: {done.stderr[-2000:]}")
        yield Path(folder)


class Team:
    """The ranks of one checkout, waiting for their turn."""

    def __init__(self, source: Path, case: Case, width: int, folder: Path) -> None:
        """Start them. Raises RuntimeError where they take hybridcomp from somewhere else."""
        folder.mkdir()
        known = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
        self._logs = [folder / f"rank{rank}.log" for rank in range(RANKS)]
        shutil.copy(HERE / "rank.py", folder)  # beside nothing of this checkout
        self._ranks = []
        for rank, log in enumerate(self._logs):
            words = map(str, (rank, RANKS, case.kind, case.stage, width, folder))
            with log.open("w") as errors:
                self._ranks.append(
                    subprocess.Popen(
                        [sys.executable, str(folder / "rank.py"), *words], env=known, cwd=folder,
                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                    )
                )  # fmt: skip
        try:
            self._check(source)
        except RuntimeError:
            self.end()
            raise

    def _check(self, source: Path) -> None:
        """Raise RuntimeError where a rank ended, or has hybridcomp from elsewhere."""
        for path in self._answers():
            # None: ``source`` has a folder of that name without a package in it, and the modules
            # come from wherever hybridcomp is installed
            if path is None or source not in Path(path).parents:
                raise RuntimeError(f"expected hybridcomp of {source}, found {path or 'no package'}")

    def turn(self, steps: int) -> float:
        """Return the slowest rank's seconds of ``steps`` steps."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{steps}\n")
            rank.stdin.flush()
        return float(max(self._answers()))

    def end(self) -> None:
        """Let the ranks end."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            try:
                rank.wait(10)
            except subprocess.TimeoutExpired:
                rank.kill()

    def _answers(self) -> list[Any]:
        """Read an answer of every rank. Raises RuntimeError with the log of a rank that ended."""
        found = []
        for rank, log in zip(self._ranks, self._logs, strict=True):
            assert rank.stdout is not None
            for line in rank.stdout:
                if line.startswith(ANSWER):
                    found.append(json.loads(line.removeprefix(ANSWER)))
                    break
            else:
                raise RuntimeError(f"a rank ended: {log.read_text()[-2000:]}")
        return found


def compare(case: Case, sources: Sequence[Path], turns: int, width: int) -> dict[str, Any]:
    """Return milliseconds of a step of the older and the newer of ``sources``, and their ratios."""
    draw, seconds = random.Random(0), [[], []]  # type: tuple[random.Random, list[list[float]]]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        teams = []
        for number, source in enumerate(sources):
            teams.append(Team(source, case, width, folder / str(number)))
            stack.callback(teams[-1].end)
        for team in teams:
            team.turn(STEPS)  # warm-up
        for _ in range(turns):
            for number in draw.sample(range(2), 2):
                seconds[number].append(teams[number].turn(STEPS))
    old, new = (statistics.median(of) * 1e3 / STEPS for of in seconds)
    ratios = [b / a for a, b in zip(*seconds, strict=True)]
    return {"case": str(case), "old_ms": old, "new_ms": new, "ratios": ratios}
