"""Remaining time, by parts done; a bar in a terminal and lines elsewhere."""

from __future__ import annotations

import io
import sys
import time

import pytest

from hybridcomp.tools.progress import BAR_S, LINE_S, ProgressDisplay, left_of


def test_the_time_left_follows_from_the_parts_that_were_worked_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, said = [100.0], list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with ProgressDisplay(5, said.append) as progress:
        progress.show(0, "a")
        progress.skip()  # existed already
        progress.show(1, "b")
        now[0] += 34
        progress.show(1.5, "b")
        progress.show(3, "c")
        progress.say("done")
        progress.show(5, "e")
    assert said == [
        "a", "b", "b, about 4 min left", "c, about 34 s left", "done",
        "e, about 0 s left",
    ]  # fmt: skip
    assert progress.every == LINE_S


def test_what_takes_a_moment_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [0.0], list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with ProgressDisplay(9, said.append, least_s=5.0) as progress:
        for part in range(9):
            progress.show(part, f"part {part}")
            now[0] += 2.0
    assert said == ["part 3, about 12 s left", "part 6, about 6 s left"]


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.4, "about 0 s left"), (99, "about 99 s left"), (600, "about 10 min left"),
     (9000, "about 2.5 h left")],
)  # fmt: skip
def test_time_left_in_words(seconds: float, told: str) -> None:
    assert left_of(seconds) == told


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_bar_and_lines_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", Terminal())
    said: list[str] = []
    with ProgressDisplay(2, said.append) as progress:
        assert progress.every == BAR_S
        progress.show(0, "first [bold]")
        progress.say("first: done [/x]")
        progress.show(1, "second")
    assert isinstance(sys.stderr, Terminal)
    shown = sys.stderr.getvalue()
    assert "first: done [/x]" in shown and "second, about 0 s left" in shown and not said
