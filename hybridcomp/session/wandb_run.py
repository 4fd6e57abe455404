"""The ledger's figures in a W&B run that somebody else made: Hugging Face's Trainer, Megatron.

Who made the run numbers its rows: W&B refuses numbers that go back, so nothing here begins a row.
The figures go into the row that is open, whenever the training completes it, with the optimizer
step as an axis of their own. Where several reports fall into one row they are added up: a sum over
rows is a sum over reports.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from hybridcomp.session.metric_names import PREFIX, STEP

#: figures that add up over reports; of others the last counts
SUMS = frozenset({"raw_MB", "wire_MB", "codec_ms", "wait_ms"})


class OpenRow:
    """What was put into the row that W&B has open."""

    def __init__(self) -> None:
        self._run: Any = None
        self._number: int | None = None
        self._values: dict[str, float] = {}

    def log(self, events: Iterable[tuple[str, float]], step: int) -> bool:
        """Put the figures of one report into this process's W&B run; whether there is one.

        ``events``: names and figures, ``step``: optimizer steps taken.
        """
        run = getattr(sys.modules.get("wandb"), "run", None)
        values = dict(events)
        if run is None or not values:
            return False
        if run is not self._run:
            run.define_metric(STEP, hidden=True)
            run.define_metric(f"{PREFIX}*", step_metric=STEP)
        before = self._values if (run, run.step) == (self._run, self._number) else {}
        self._run, self._number = run, run.step
        self._values = {**before, **added(before, values), STEP: step}
        run.log(self._values, commit=False)
        return True


def added(before: dict[str, float], values: dict[str, float]) -> dict[str, float]:
    """``values`` of a report on top of those of the reports ``before``: sums add up."""
    found = {
        name: value + before.get(name, 0.0) if name.rpartition("/")[2] in SUMS else value
        for name, value in values.items()
    }
    for name in found:
        place, _, figure = name.rpartition("/")
        if figure == "ratio" and found.get(f"{place}/wire_MB"):
            found[name] = found[f"{place}/raw_MB"] / found[f"{place}/wire_MB"]
    return found


_row = OpenRow()


def log(events: Iterable[tuple[str, float]], step: int) -> bool:
    """Put the figures of one report into this process's W&B run; whether there is one."""
    return _row.log(events, step)
