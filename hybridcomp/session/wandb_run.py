"""Write the ledger's figures into an existing W&B run of Hugging Face's Trainer or Megatron.

The run's creator numbers its rows, and W&B rejects decreasing numbers, so this module never starts
a row. The figures go into the open row, which the training completes, with the optimizer step as
their axis. If a row gets several reports, their figures are added up, so that a sum over rows is a
sum over reports.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from hybridcomp.metric_names import PREFIX, STEP

#: figures that are added up over a row's reports; of all other figures the last value counts
SUMS = frozenset({"raw_MB", "wire_MB", "codec_ms", "wait_ms"})


def ended_by(error: BaseException) -> str | None:
    """Return what to do about W&B's ``error``, such as a missing key; None for other errors."""
    if not type(error).__module__.startswith("wandb"):
        return None
    said = " ".join(str(error).split()).rstrip(".")
    return (
        f"W&B ended this job: {said}; run `wandb login` or set WANDB_API_KEY, or set "
        "WANDB_MODE=offline and run `wandb sync FOLDER` later"
    )


class OpenRow:
    """Values that were put into the row that is open in W&B."""

    def __init__(self) -> None:
        self._run: Any = None
        self._number: int | None = None
        self._values: dict[str, float] = {}

    def log(self, events: Iterable[tuple[str, float]], step: int) -> bool:
        """Put a report's figures into this process's W&B run; return False if there is no run.

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
    """Return a report's ``values``, with the figures in SUMS added to earlier reports' figures."""
    summed = {
        name: value + before.get(name, 0.0) if name.rpartition("/")[2] in SUMS else value
        for name, value in values.items()
    }
    for name in summed:
        place, _, figure = name.rpartition("/")
        if figure == "ratio" and summed.get(f"{place}/wire_MB"):
            summed[name] = summed[f"{place}/raw_MB"] / summed[f"{place}/wire_MB"]
    return summed


_row = OpenRow()


def log(events: Iterable[tuple[str, float]], step: int) -> bool:
    return _row.log(events, step)
