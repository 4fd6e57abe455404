"""Read the samples of a step together, so that the host waits for a GPU only once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from hybridcomp.codecs import read_together

#: maximum waiting samples; an evaluation in a sampled step can send any number of messages
MOST = 256


@dataclass
class LateSamples:
    """Sums of samples that a device still computes, each with the function that records them.

    They are read at the end of the step that sampled them, at the latest before a report. A job
    that ends earlier loses them, as it loses that interval of the ledger.
    """

    waiting: list[tuple[Tensor, Callable[..., None]]] = field(default_factory=list)

    def add(self, sums: Tensor, write: Callable[..., None]) -> None:
        """Call ``write`` with ``sums`` (float64, 1-D) as numbers: on a CPU at once, else in
        ``read``.
        """
        if sums.device.type == "cpu":
            write(*sums.tolist())
            return
        self.waiting.append((sums, write))
        if len(self.waiting) >= MOST:
            self.read()

    def read(self) -> None:
        """Wait for the devices of all pending samples, and record them in order."""
        waiting, self.waiting = self.waiting, []
        rows = read_together([sums for sums, _ in waiting])
        for row, (_, write) in zip(rows, waiting, strict=True):
            write(*row)
