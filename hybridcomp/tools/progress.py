"""Show how far a long command is and how long it still takes: a bar in a terminal, else lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from types import TracebackType
from typing import Any

#: seconds between two updates, for a bar and for lines
BAR_S, LINE_S = 1.0, 30.0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def left_of(seconds: float) -> str:
    """Format seconds that are left: ``about 40 s left``, ``about 12 min left``."""
    if seconds < 100:
        return f"about {seconds:.0f} s left"
    minutes = seconds / 60
    return f"about {minutes:.0f} min left" if minutes < 100 else f"about {minutes / 60:.1f} h left"


class ProgressDisplay:
    """Shows how many parts are done, and the time left as estimated from the parts worked on."""

    def __init__(
        self, parts: float, say: Callable[[str], object] = _say, least_s: float = 0.0
    ) -> None:
        """Begin.

        Args:
            parts: number of parts of the work.
            say: prints a line, where there is no bar.
            least_s: least seconds before each line, so that short work prints none.
        """
        self._parts, self._say, self._least_s = parts, say, least_s
        self._start = self._told = time.monotonic()
        self._skipped = 0
        self._bar: Any = None
        self._task: Any = None

    @property
    def every(self) -> float:
        """Return the interval of ``show`` calls during a part, in seconds."""
        return LINE_S if self._bar is None else BAR_S

    def __enter__(self) -> ProgressDisplay:
        """Start the bar, if standard error is a terminal and rich is installed."""
        if sys.stderr.isatty() and find_spec("rich") is not None:
            from rich import progress
            from rich.console import Console

            columns = progress.BarColumn(), progress.TextColumn("{task.description}", markup=False)
            self._bar = progress.Progress(
                *columns, console=Console(stderr=True), transient=True,
                redirect_stdout=sys.stdout.isatty(),
            )  # fmt: skip
            self._task = self._bar.add_task("", total=self._parts)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()

    def show(self, done: float, text: str) -> None:
        """Show that ``done`` parts are complete, and the current part; as a bar or a line."""
        left = self.left(done)
        words = text if left is None else f"{text}, {left_of(left)}"
        if self._bar is None and time.monotonic() - self._told >= self._least_s:
            self._say(words)
            self._told = time.monotonic()
        elif self._bar is not None:
            self._bar.update(self._task, completed=done, description=words)

    def say(self, text: str) -> None:
        """Print a line that stays, above the bar if there is one."""
        if self._bar is None:
            self._say(text)
        else:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def skip(self) -> None:
        """Leave a part out of the estimated speed, since an earlier run has done it."""
        self._skipped += 1

    def left(self, done: float) -> float | None:
        """Return the seconds left at the speed so far; None before any part was worked on."""
        worked = done - self._skipped
        spent = time.monotonic() - self._start
        return None if worked <= 0 else spent * max(0.0, self._parts - done) / worked
