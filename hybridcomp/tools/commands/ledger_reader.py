"""Read the records that a running job appends to its ledger, and format a table and sentences."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from hybridcomp.escaping import SENTENCE, one_line, parsed_json
from hybridcomp.metric_names import SAVED_S, TIME, TOTALS, follower_line
from hybridcomp.tools.compare.figures import named
from hybridcomp.tools.compare.runs import short

#: seconds between updates of the age of the last report
AGE_S = 10.0
#: a job is called late after this many intervals between reports
LATE = 5.0
#: key of a record that holds dimensions, not the row of a follower
OWN = "dimensions"
#: figures of followers that add up over a run
COUNTS = ("versions", "full_versions", "raw_versions", "meetings", "skipped", "drains")
HEAD = ["dimension", "codec", "ratio", "error", "Mb/s", "messages", "sent MB", "native MB"]


@dataclass(frozen=True)
class Watched:
    """Accumulate the ledger records of one start of a job."""

    table: list[list[str]] = field(default_factory=lambda: [HEAD])  # table of the last report
    # MB sent so far, and MB that native messages would have taken
    sent: dict[str, tuple[float, float]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)  # the last sampled errors
    followers: dict[str, dict[str, float]] = field(default_factory=dict)
    step: int = 0
    steps: int = 0  # steps between the last two reports
    at: float | None = None  # time of the last report, in seconds since 1970
    seconds: float | None = None  # seconds between the last two reports
    saved_s: float | None = None
    totals: tuple[float, float] | None = None  # native MB and sent MB since the run began
    ended: bool = False

    def after(self, record: Mapping[str, Any]) -> Watched:
        """Return the state after one more record.

        Raises ValueError, TypeError, KeyError or AttributeError if it is no record of a ledger.
        """
        step, at = int(record["step"]), _number(record.get(TIME))
        if record.get("summary"):
            return replace(self, ended=True, at=self.at if at is None else at)
        seconds = None if at is None or self.at is None else at - self.at
        table, sent, errors = [HEAD], dict(self.sent), dict(self.errors)
        for dimension, ways in record["dimensions"].items():
            for way, row in ways.items():
                name = named(dimension, way)
                before = sent.get(name, (0.0, 0.0))
                sent[name] = before[0] + float(row["wire_MB"]), before[1] + float(row["raw_MB"])
                if row.get("error") is not None:  # not every report has sampled an error
                    errors[name] = float(row["error"])
                table.append(_cells(name, row, seconds, sent[name], errors.get(name)))
        rows = {name: row for name, row in record.items()
                if isinstance(row, Mapping) and name != OWN}  # fmt: skip
        followers = {name: self._with(name, row) for name, row in rows.items()}
        native, moved = (_number(record.get(name)) for name in TOTALS)
        saved = _number(record.get(SAVED_S))
        return Watched(
            table, sent, errors, self.followers | followers, step, step - self.step, at, seconds,
            self.saved_s if saved is None else saved,
            self.totals if native is None or moved is None else (native, moved),
        )  # fmt: skip

    def _with(self, name: str, row: Mapping[str, Any]) -> dict[str, float]:
        """Return the row of follower ``name``, with counts added up over all its rows so far."""
        before = self.followers.get(name, {})
        return {
            key: float(value) + (before.get(key, 0.0) if key in COUNTS else 0.0)
            for key, value in row.items()
        }

    def lines(self, now: float) -> Iterator[str]:
        """Yield sentences about the run: its step, what it saved, and the age of its figures."""
        words = [f"step {self.step:,}"]
        if self.seconds and self.steps > 0:
            words.append(f"{self.seconds / self.steps:.3g} s a step")
        if self.totals is not None:
            native, sent = self.totals
            ratio = f" ({native / sent:.2f}x)" if sent else ""
            words.append(
                f"sent {sent:,.1f} MB, natively it would have been {native:,.1f} MB{ratio}"
            )
        if self.saved_s is not None:
            verb = "saved" if self.saved_s >= 0 else "lost"
            words.append(f"{verb} about {abs(self.saved_s):,.0f} s as far as measured")
        yield ", ".join(words)
        yield from map(follower_line, self.followers.items())
        if self.at is None:
            return
        age = max(0.0, now - self.at)
        clock = time.strftime("%H:%M:%S", time.localtime(self.at))
        if self.ended:
            yield f"the job ended at {clock}"
        else:
            late = bool(self.seconds) and age > LATE * (self.seconds or 0.0) and age > AGE_S
            yield f"last report at {clock}, {_long(age)} ago" + (
                ": the job is late, or was ended" if late else ""
            )


def _long(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 3600:.1f} h"


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _cells(
    name: str, row: Mapping[str, Any], seconds: float | None, sent: tuple[float, float],
    error: float | None,
) -> list[str]:  # fmt: skip
    """Format the row of one interval; ``sent``: MB sent so far, and MB of native messages."""
    ratio = _number(row.get("ratio"))
    return [
        name,
        short(str(row.get("codec", "?"))),
        "-" if ratio is None else f"{ratio:.2f}x",
        "-" if error is None else f"{error:.1e}",
        f"{8 * float(row['wire_MB']) / seconds:,.1f}" if seconds else "-",
        _messages(row),
        *(f"{value:,.1f}" for value in sent),
    ]


def _messages(row: Mapping[str, Any]) -> str:
    """Return whether the messages of a report were encoded or native, and since when."""
    whole, native = int(row.get("messages") or 0), int(row.get("native_messages") or 0)
    text = (
        "encoded"
        if not native
        else "native"
        if native == whole
        else f"encoded, {native} of {whole} native"
    )
    since = [f"{mode} since step {step}" for mode in ("native", "encoded")
             if (step := row.get(f"{mode}_since")) is not None]  # fmt: skip
    return ", ".join(since) or text


class LedgerReader:
    """Reads from its beginning a file that a job appends to, and after a restart the new file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.watched: Watched | None = None  # None until a first record
        self.unreadable = 0  # unreadable lines
        self._file: BinaryIO | None = None
        self._rest = b""
        if str(path) == "-":
            os.set_blocking(sys.stdin.fileno(), False)
            self._file = sys.stdin.buffer

    def read(self) -> bool:
        """Read the records since the last call; return whether there were any.

        An absent file has no records yet. Reads a replaced or shortened file from its beginning,
        since a restarted job moves the old file aside.
        """
        if str(self.path) != "-":
            self._open()
        data = self._file.read() if self._file is not None else None
        *whole, self._rest = (self._rest + (data or b"")).split(b"\n")
        for text in whole:
            self._take(text)
        return bool(whole)

    def _open(self) -> None:
        try:
            there = self.path.stat()
        except FileNotFoundError:
            return  # keep the figures read so far: between two starts there is no file
        if self._file is not None:
            mine = os.fstat(self._file.fileno())
            same = (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)
            if same and there.st_size >= self._file.tell():
                return
            self._file.close()
        self._file, self._rest, self.watched = self.path.open("rb"), b"", None

    def _take(self, text: bytes) -> None:
        """Add a line to the figures; a step lower than before marks another start of the job."""
        try:
            record = parsed_json(text.decode())
            summary, step = bool(record.get("summary")), int(record["step"])
            begun = self.watched is None or (not summary and step <= self.watched.step)
            before = Watched() if begun or self.watched is None else self.watched
            self.watched = before.after(record)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            self.unreadable += 1

    def told(self, now: float) -> list[str]:
        """Return the sentences to show beside the table."""
        nothing = "no report yet" if self._file is not None else "no report yet, and no such file"
        lines = [nothing] if self.watched is None else list(self.watched.lines(now))
        if self.unreadable:
            whole = "line is no record" if self.unreadable == 1 else "lines are no records"
            lines.append(f"{self.unreadable} {whole} of a ledger")
        return [one_line(line, SENTENCE) for line in lines]

    def table(self) -> list[list[str]]:
        """Return the head and rows of the table."""
        rows = [HEAD] if self.watched is None else self.watched.table
        return [[one_line(cell) for cell in row] for row in rows]
