"""Make the n-th step of an operation fail on one rank: any call that hybridcomp's code makes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import hybridcomp
from hybridcomp.job.gates import here

#: what carries the word of a failure, and what only words it
SPARED = (
    "gates.py",
    "agreement.py",
    "together.py",
    "statements.py",
    "errors.py",
    "log.py",
    "processes.py",
)
HERE = str(Path(hybridcomp.__file__).parent)
PATCHES = str(Path(HERE).parent / "patches")


class Injected(RuntimeError):
    """The failure that was asked for."""


@dataclass
class Steps:
    """Counts the steps that can fail, and lets one fail.

    A step is a call of a function of hybridcomp, or of one in C from there (torch, files).

    Attributes:
        fails_at: the step; None: no one does.
        everywhere: whether steps outside of operations count: those of what no other rank does.
        found: steps so far.
        where: the step that failed.
    """

    fails_at: int | None = None
    everywhere: bool = False
    found: int = 0
    where: str = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "c_call") or not (self.everywhere or here.operations):
            return
        code = frame.f_code
        file = code.co_filename
        if not file.startswith((HERE, PATCHES)) or file.endswith(SPARED):
            return
        self.found += 1
        if self.found - 1 == self.fails_at:
            called = getattr(argument, "__qualname__", "") if event == "c_call" else "begins"
            self.where = f"{Path(file).name}:{frame.f_lineno} {code.co_qualname}: {called}"
            sys.setprofile(None)
            raise Injected(self.where)


@contextlib.contextmanager
def steps(fails_at: int | None = None, everywhere: bool = False) -> Iterator[Steps]:
    """Count the steps of the body, and let one fail."""
    counter = Steps(fails_at, everywhere)
    sys.setprofile(counter)
    try:
        yield counter
    finally:
        sys.setprofile(None)


def counted(work: Callable[[], object]) -> int:
    """Return how many steps ``work`` takes."""
    with steps() as found:
        work()
    return found.found
