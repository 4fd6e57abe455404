"""Losses over time of one link, and the tables that compare them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.layout import parse_rate

#: steps whose mean is the loss at the end of the last of them
WINDOW = 30
NATIVE, EVERY_STEP, PLAIN, STREAMING = "native", "every step 4 bits", "diloco 4 bits", "streaming"
PLAIN_FP32, STREAMING_FP32 = "diloco fp32", "streaming fp32"
#: a meeting at once, and the same by fragments with a delay
PAIRS = ((PLAIN, STREAMING), (PLAIN_FP32, STREAMING_FP32))
ORDER = (NATIVE, EVERY_STEP, PLAIN, STREAMING)


@dataclass(frozen=True)
class SiteRun:
    """Run of one case on one link.

    Attributes:
        losses, ends: by step, and the seconds at which it ended.
        sent: bytes of one site.
        wait_ms: of its first rank in meetings, None without any.
        every: steps from one meeting of all weights to the next, 1 without meetings.
    """

    losses: NDArray[np.float64]
    ends: NDArray[np.float64]
    sent: int
    wait_ms: float | None
    every: int

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> SiteRun:
        """Return the run of a file of rank.py."""
        sync = ((row["told"]["block"] or {}).get("sync")) or {}
        return cls(
            np.asarray(row["losses"]), np.asarray(row["ends"]), int(row["sent"]),
            row.get("meet_wait_ms"), sync.get("every", 1),
        )  # fmt: skip

    @property
    def window(self) -> int:
        """Return the steps of a mean."""
        return min(WINDOW, len(self.losses))

    @property
    def best(self) -> NDArray[np.float64]:
        """Return by step, from the end of the first window, the lowest mean loss until then."""
        kernel = np.full(self.window, 1 / self.window)
        return np.minimum.accumulate(np.convolve(self.losses, kernel, "valid"))

    def seconds_to(self, level: float) -> float | None:
        """Return when the loss is ``level`` for the first time, between two steps by a line."""
        best, ends = self.best, self.ends[self.window - 1 :]
        if best[-1] > level:
            return None
        for (low, high), (begin, end) in zip(pairwise(best), pairwise(ends), strict=True):
            if high <= level < low:
                return float(begin + (end - begin) * (low - level) / (low - high))
        return float(ends[0])

    @property
    def step_s(self) -> float:
        """Return the mean seconds of a step."""
        return float(self.ends[-1] / len(self.ends))

    @property
    def wait_a_round_ms(self) -> float | None:
        """Return the wait for one meeting of all weights, in all its fragments."""
        rounds = len(self.losses) // self.every
        return None if self.wait_ms is None or not rounds else self.wait_ms / rounds


Runs = dict[str, SiteRun]


def links(out: Path) -> dict[str, Runs]:
    """Return the finished runs by link and case, from slow links to fast ones."""
    found: dict[str, Runs] = {}
    for file in sorted(out.glob("*/*.json")):
        found.setdefault(file.parent.name, {})[file.stem] = SiteRun.of(json.loads(file.read_text()))
    ordered = sorted(found, key=lambda rate: parse_rate(rate) or float("inf"))
    return {rate: dict(sorted(found[rate].items(), key=_place)) for rate in ordered}


def _place(pair: tuple[str, SiteRun]) -> tuple[int, str]:
    name = pair[0]
    return (ORDER.index(name) if name in ORDER else len(ORDER)), name


def level_of(runs: Sequence[SiteRun]) -> float:
    """Return the lowest loss that all reach."""
    return max(float(run.best[-1]) for run in runs)


def tables(found: Mapping[str, Runs]) -> list[str]:
    """Return Markdown: a table of times for each link, and one of meetings that are hidden."""
    lines: list[str] = []
    for rate, runs in found.items():
        lines += ["", f"Links of {_words(rate)}:", "", *times(runs)]
    rows = hidden(found)
    if len(rows) > 2:
        lines += ["", "Waits for one meeting of all weights, by fragments or at once:", "", *rows]
    return lines


def _words(rate: str) -> str:
    """``50mbit`` -> ``50 Mb/s``."""
    return rate.replace("mbit", " Mb/s").replace("gbit", " Gb/s")


def times(runs: Runs) -> list[str]:
    """Return the rows of one link; times to a loss are over those of 4 bits every step."""
    runs = {name: run for name, run in runs.items() if name not in PAIRS[1]}
    levels = [level_of(list(runs.values()))]
    few = [run for name, run in runs.items() if name != NATIVE]
    if few and NATIVE in runs and level_of(few) != levels[0]:
        levels.append(level_of(few))
    head = ["run", "steps", "s a step", "MB a step", "loss at the end"]
    for level in levels:
        head += [f"s to {level:.3f}", "times as fast"]
    rows = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, run in runs.items():
        megabytes = run.sent / len(run.losses) / 1e6
        cells = [name, str(len(run.losses)), f"{run.step_s:.3f}", f"{megabytes:.3f}",
                 f"{run.best[-1]:.3f}"]  # fmt: skip
        for level in levels:
            own = run.seconds_to(level)
            base = runs[EVERY_STEP].seconds_to(level) if EVERY_STEP in runs else None
            cells.append("-" if own is None else f"{own:.1f}")
            cells.append("-" if own is None or base is None else f"{base / own:.2f}")
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def hidden(found: Mapping[str, Runs]) -> list[str]:
    """Return the rows of how much of a meeting's wait fragments and delay hide."""
    rows = ["| link | messages | at once, ms | streaming, ms | hidden |", "|---|---|---|---|---|"]
    for rate, runs in found.items():
        for number, names in enumerate(PAIRS):
            both = [runs[name].wait_a_round_ms for name in names if name in runs]
            if len(both) == 2 and both[0] and both[1] is not None:
                cells = [_words(rate), ("4 bits", "fp32")[number]]
                cells += [f"{both[0]:.1f}", f"{both[1]:.1f}"]
                rows.append(f"| {' | '.join([*cells, f'{1 - both[1] / both[0]:.0%}'])} |")
    return rows
