"""Print a job's last line: bytes sent, seconds saved if measured, worst error, report.

Each engine or model opens an ``Account`` on rank 0. Accounts hold numbers only, so a model that is
dropped before the end still counts. The line is printed when the process ends, also by ``sys.exit``
or an exception, and in ranks started by ``multiprocessing``, which do not run ``atexit``.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import util
from typing import Protocol, TypeVar

from hybridcomp.channels.accounting.ledger import Entry, Key
from hybridcomp.channels.accounting.time_saved import TimeSaved
from hybridcomp.dimensions import Dimension
from hybridcomp.log import say

C = TypeVar("C")
#: text if no seconds of the run were measured
UNTIMED = 'seconds were not measured ("when": "auto" measures them)'


class Closable(Protocol):
    """Object that is closed before the process ends."""

    def close(self) -> None:
        """Write and print pending records; harmless when called twice."""


@dataclass
class Account:
    """Traffic of one engine or model, on all ranks as far as reported."""

    gains: TimeSaved
    report: str = ""  # file with the engine's records
    step: int = 0  # step of the last report
    raw_nbytes: float = 0.0
    wire_nbytes: float = 0.0
    encoded: float = 0.0  # number of encoded messages
    error: float = 0.0
    worst: Dimension | None = None
    outside: float = 0.0
    rest: float = 0.0  # number of this rank's messages since the last report
    idle: str = ""  # why nothing is compressed, if so
    also: tuple[str, ...] = ()  # work of followers, such as publishing versions
    dimensions: set[Dimension] = field(default_factory=set)  # encoded dimensions

    def add(self, entries: Mapping[Key, Entry]) -> None:
        """Add ledger entries: a report's, summed over ranks, or without a report this rank's."""
        for (dimension, _), entry in entries.items():
            self.raw_nbytes += entry.raw_nbytes
            self.wire_nbytes += entry.wire_nbytes
            self.outside += entry.outside
            if entry.messages > entry.native or (dimension == "sync" and entry.messages):
                self.encoded += entry.messages  # ``sync`` also saves bytes unencoded
                self.dimensions.add(dimension)
            if entry.error is not None and entry.error > self.error:
                self.error, self.worst = entry.error, dimension

    def close(self, entries: Mapping[Key, Entry], idle: str, also: Iterable[str] = ()) -> None:
        """Take this rank's entries since the last report; without any report add them to the sums.

        ``idle``: why nothing was compressed, if so; ``also``: work of followers, in words.
        """
        self.also = tuple(also)
        self.rest = sum(entry.messages for entry in entries.values())
        if not self.step:
            self.add(entries)
        self.idle = idle


_accounts: list[Account] = []
#: open objects, held weakly: dropping a model drops its session and its ledger
_open: weakref.WeakSet[Closable] = weakref.WeakSet()
# ids of processes with a registered end, since forks inherit this list
_registered_in: list[int] = []


def open_account(gains: TimeSaved, report: str) -> Account:
    """Open the account of a model on rank 0; the job's last line will include it."""
    _register_end()
    account = Account(gains, report)
    _accounts.append(account)
    return account


def forget() -> None:
    """Drop the accounts so far, of trainings that only measured something: no last line."""
    _accounts.clear()


def close_at_the_end(closable: Closable) -> None:
    """Close ``closable`` before the process ends, unless it was garbage-collected before."""
    _register_end()
    _open.add(closable)


def opened(kind: type[C]) -> list[C]:
    """Return the objects of a kind that ``close_at_the_end`` got and that still exist."""
    return [one for one in _open if isinstance(one, kind)]


def _register_end() -> None:
    """Have this process close open objects at its end; a fork first drops its parent's objects."""
    if os.getpid() not in _registered_in:
        _registered_in[:] = [os.getpid()]
        _accounts.clear()
        _open.clear()
        util.Finalize(None, _end, exitpriority=0)


def _end() -> None:
    """Close all open objects, also after one fails; then print the last line."""
    with ExitStack() as ends:
        ends.callback(_say_last)
        for closable in list(_open):
            ends.callback(closable.close)


def _say_last() -> None:
    if _accounts:
        say(last_line(_accounts), anywhere=True)
    _accounts.clear()


def last_line(accounts: list[Account]) -> str:
    """Summarize the accounts in one sentence."""
    raw, wire = sum(a.raw_nbytes for a in accounts), sum(a.wire_nbytes for a in accounts)
    files = dict.fromkeys(a.report for a in accounts if a.report)
    report = f"report {', '.join(files)}" if files else "no report file"
    also = [text for a in accounts for text in a.also]
    if not any(a.encoded for a in accounts):
        why = "; ".join(dict.fromkeys(a.idle for a in accounts if a.idle))
        spent = sum(a.gains.spent_s for a in accounts)
        lost = f"; measuring took {spent:.1f} s" if spent else ""
        done = f"{', '.join(also)}, and compressed nothing else" if also else "compressed nothing"
        return f"this run {done}: {why}{lost} ({report})"
    reported = any(a.step for a in accounts)
    late = reported and any(a.rest for a in accounts)
    whose = "this run" if reported else "in this run rank 0"
    until = f"until step {max(a.step for a in accounts)}, its last report, " if late else ""
    part = "" if reported else " (the other ranks had not reported yet)"
    sent = f"{_megabytes(wire)} MB, natively it would have been {_megabytes(raw)} MB{part}"
    parts = [f"{until}{whose} sent {sent}", *also, _saved(accounts), _error(accounts), report]
    return ", ".join(parts)


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.0f}" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g}"


def _saved(accounts: list[Account]) -> str:
    encoded = dict.fromkeys(name for a in accounts for name in sorted(a.dimensions))
    timed = [n for n in encoded if any(n in a.gains.by_dimension for a in accounts)]
    alone = [n for n in encoded if any(n in a.gains.timed_alone for a in accounts)]
    if not timed and alone:
        return (
            f"single messages of {', '.join(alone)} were timed, and no step: seconds are not known"
        )
    if not timed:
        return UNTIMED
    saved = sum(a.gains.net_s for a in accounts)
    verb = "saved" if saved >= 0 else "lost"
    whose = f" ({', '.join(timed)} alone)" if len(timed) < len(encoded) else ""
    return f"{verb} about {abs(saved):.{0 if abs(saved) >= 10 else 1}f} s as far as measured{whose}"


def _error(accounts: list[Account]) -> str:
    outside = round(sum(a.outside for a in accounts))
    text = f", {outside} sampled values OUTSIDE THE BOUND" if outside else ""
    worst = max(accounts, key=lambda account: account.error)
    if worst.worst is None:
        return f"no error sampled{text}"
    return f"worst error {worst.error:.1e} ({worst.worst}){text}"
