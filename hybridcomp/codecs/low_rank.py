"""Low-rank reduction of gradients that are matrices, instead of an encoding.

``collectives/low_rank.py`` implements the reduction. The codec ``powersgd`` selects it by its
property ``low_rank``.
"""

from __future__ import annotations

from dataclasses import dataclass

#: least n * m / (rank * (n + m)) at which an n x m matrix is sent as factors; below, the factors
#: save too few values (``min_compression_rate`` of torch's hook)
LEAST_SAVING = 2.0


@dataclass(frozen=True)
class LowRank:
    """Reduction of gradients as products of two matrices with ``rank`` columns."""

    rank: int
    spec: str  # name of the reduction in the ledger and in the agreement of ranks

    def worthwhile(self, rows: int, columns: int) -> bool:
        """Return whether a matrix is sent as factors; if not, its values are sent."""
        return self.rank * (rows + columns) * LEAST_SAVING <= rows * columns
