"""Write the ledger's figures into an existing W&B run: Hugging Face's Trainer's or Megatron's.

The maker of the run numbers its rows, and W&B refuses numbers that go back, so this module begins
no row. The figures go into the open row, which the training completes, with the optimizer step as
their axis. Several reports in one row are added up: a sum over rows is a sum over reports.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from hybridcomp.metric_names import PREFIX, STEP

#: figures that add up over reports; of others the last counts
SUMS = frozenset({"raw_MB", "wire_MB", "codec_ms", "wait_ms"})


class OpenRow:
    """Values that were put into the row that W&B has open."""

    def __init__(self) -> None:
        self._run: Any = None
        self._number: int | None = None
        self._values: dict[str, float] = {}

    def log(self, events: Iterable[tuple[str, float]], step: int) -> bool:
        """Put the figures of one report into this process's W&B run; returns whether there is one.

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
    """Add the ``values`` of a report to those of the reports ``before``, where they are sums."""
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
    """Put the figures of one report into this process's W&B run; returns whether there is one."""
    return _row.log(events, step)
