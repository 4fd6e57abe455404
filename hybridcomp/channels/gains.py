"""Seconds that encoding has saved, as far as ``"when": "auto"`` has measured them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from hybridcomp.autotune.verdicts import Verdicts
from hybridcomp.policy import Dimension


@dataclass
class Gains:
    """What encoded steps of this process took less than native ones would have.

    A verdict says what a step gains: what its trial took natively less what it took encoded, and
    once steps of the run were compared, what these did. Not saved: a run that goes on from
    a checkpoint counts its own steps.
    """

    by_dimension: dict[Dimension, float] = field(default_factory=dict)  # seconds
    spent_s: float = 0.0  # by measuring

    @property
    def net_s(self) -> float:
        """Seconds saved, less those that measuring took."""
        return sum(self.by_dimension.values()) - self.spent_s

    def count(self, verdicts: Verdicts, step: int, without: Collection[Dimension]) -> None:
        """Count ``step``, which is over and was allowed to encode all but ``without``."""
        for name, verdict in verdicts.by_dimension.items():
            known = verdict.gain_s is not None and name not in without
            if known and not verdicts.native(name, step):
                self.by_dimension[name] = self.by_dimension.get(name, 0.0) + (verdict.gain_s or 0.0)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Count the seconds inside as spent."""
        start = perf_counter()
        try:
            yield
        finally:
            self.spent_s += perf_counter() - start
