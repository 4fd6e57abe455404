"""Low rank: a way to reduce gradients that are matrices. It encodes nothing.

``collectives/low_rank.py`` is the reduction. What stands in the place of a codec beside it
(``powersgd``) says through ``low_rank`` that gradients are reduced like this.
"""

from __future__ import annotations

from dataclasses import dataclass

#: a matrix of n x m values is sent as factors when n * m is at least this many times their
#: rank * (n + m) values; below, the error buys too little (torch's hook: min_compression_rate)
LEAST_SAVING = 2.0


@dataclass(frozen=True)
class LowRank:
    """Gradients as products of two matrices with ``rank`` columns."""

    rank: int
    spec: str  # what the ledger and the agreement of ranks call it

    def worthwhile(self, rows: int, columns: int) -> bool:
        """Whether a matrix is sent as factors; otherwise its values are sent."""
        return self.rank * (rows + columns) * LEAST_SAVING <= rows * columns
