"""Count the seconds that encoding has saved, as far as ``"when": "auto"`` has measured them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from hybridcomp.autotune.verdicts import Verdicts
from hybridcomp.dimensions import Dimension


@dataclass
class TimeSaved:
    """Seconds that the encoded steps of this process have saved over native ones.

    A verdict gives the gain per step: native minus encoded seconds in its trial or, once real steps
    were compared, in those. Checkpoints do not hold this: a resumed run counts only its own steps.
    """

    by_dimension: dict[Dimension, float] = field(default_factory=dict)  # seconds
    spent_s: float = 0.0  # seconds of measuring
    #: encoded dimensions for which single messages were timed, but no whole steps
    timed_alone: set[Dimension] = field(default_factory=set)

    @property
    def net_s(self) -> float:
        """Return the seconds saved, minus the time spent on measuring."""
        return sum(self.by_dimension.values()) - self.spent_s

    def count(self, verdicts: Verdicts, step: int, without: Collection[Dimension]) -> None:
        """Count the finished ``step``, in which all dimensions but ``without`` may be encoded."""
        for name, verdict in verdicts.by_dimension.items():
            if name in without or verdicts.native(name, step):
                continue
            if verdict.gain_s is not None:
                self.by_dimension[name] = self.by_dimension.get(name, 0.0) + verdict.gain_s
            elif verdict.nbytes:
                self.timed_alone.add(name)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Count the seconds of this context as spent on measuring."""
        start = perf_counter()
        try:
            yield
        finally:
            self.spent_s += perf_counter() - start
