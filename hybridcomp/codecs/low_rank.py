"""Low-rank reduction of gradients that are matrices, instead of an encoding.

``collectives/low_rank.py`` is the reduction. A codec (``powersgd``) selects it by its property
``low_rank``.
"""

from __future__ import annotations

from dataclasses import dataclass

#: a matrix of n x m values is sent as factors when n * m is at least this many times their
#: rank * (n + m) values; otherwise they save too little (torch's hook: min_compression_rate)
LEAST_SAVING = 2.0


@dataclass(frozen=True)
class LowRank:
    """Reduction of gradients as products of two matrices with ``rank`` columns."""

    rank: int
    spec: str  # name of the reduction in the ledger and in the agreement of ranks

    def worthwhile(self, rows: int, columns: int) -> bool:
        """Return whether a matrix is sent as factors; if not, its values are sent."""
        return self.rank * (rows + columns) * LEAST_SAVING <= rows * columns
