"""Compare a finished run with its plan's prediction, by dimension (``--check``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridcomp.channels.accounting.memory import size
from hybridcomp.dimensions import DIMENSIONS
from hybridcomp.tools.compare import json_lines
from hybridcomp.tools.compare.runs import CompareError
from hybridcomp.tools.plan.answer.report import duration
from hybridcomp.tools.plan.answer.trial import LEDGER, LOG, seconds_a_step
from hybridcomp.tools.plan.plan import Plan

#: a step with a relative error above this, outside of its interval, counts as a miss
STEP_MISS = 0.12
#: relative difference in bytes above which a run is not the planned one: bytes follow from shapes
NBYTES_MISS = 0.02


@dataclass(frozen=True)
class Compared:
    """One measured figure of a run and the plan's prediction of it."""

    what: str
    measured: float
    predicted: float
    limit: float
    unit: str  # unit: "s" or "B"
    low: float = 0.0  # ends of the predicted interval; 0: no interval
    high: float = 0.0

    @property
    def miss(self) -> float:
        """Return the measured figure over the predicted one, minus 1."""
        return self.measured / self.predicted - 1 if self.predicted else float("inf")

    @property
    def held(self) -> bool:
        """Return whether the measured figure is within the limit or the predicted interval."""
        if self.low <= self.measured <= self.high:
            return True
        return self.measured == self.predicted or abs(self.miss) <= self.limit

    def __str__(self) -> str:
        shown = duration if self.unit == "s" else size
        verdict = "" if self.held else "  <- missed"
        off = f"{self.miss:+.1%}" if self.predicted else "not predicted"
        return (
            f"{self.what:28} {shown(self.measured):>10} measured, {shown(self.predicted):>10} "
            f"predicted, {off}{verdict}"
        )


def check(plan: Plan, run: Path) -> list[Compared]:
    """Compare the figures of ``run``, a folder with its log and ledger, with the plan's.

    Raises CompareError where there is no finished run, or one of another size.
    """
    log = run / LOG if run.is_dir() else run
    told = plan.prediction
    found = [
        Compared(
            "step", seconds_a_step(log, plan), told.seconds, STEP_MISS, "s", told.low, told.high
        )
    ]
    ledger = log.with_name(LEDGER)
    if not ledger.is_file():
        raise CompareError(
            f'{ledger}: missing; write "ledger": {{"jsonl": "{ledger}"}} into the block'
        )
    steps = _steps(ledger)
    rows = json_lines.read_ledger(ledger)
    for name in DIMENSIONS:
        ways = rows.get(name, {})
        sent = 1e6 * sum(row["wire_MB"] for row in ways.values()) / steps
        predicted = told.job_nbytes.get(name, 0.0)
        if sent or predicted:
            what = f"{name}, bytes of all ranks"
            found.append(Compared(what, sent, predicted, NBYTES_MISS, "B"))
    return found


def _steps(ledger: Path) -> int:
    """Return the number of steps that the totals of a ledger cover. Raises CompareError."""
    records: list[dict[str, Any]] = json_lines.read_lines(ledger)
    steps = records[-1].get("step") if records else None
    if not isinstance(steps, int) or steps < 1:
        raise CompareError(f"{ledger}: its summary names no step; did the run train?")
    return steps


def describe(found: list[Compared]) -> Iterator[str]:
    """Yield the lines to print: every figure, then the verdict."""
    yield from map(str, found)
    missed = [one.what for one in found if not one.held]
    if missed:
        yield (
            f"the plan missed {', '.join(missed)}: measure the cluster again, and look whether "
            "the run is what plan.json says"
        )
    else:
        yield "the plan held"
