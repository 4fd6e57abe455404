"""powersgd: the settings of a low-rank reduction, and its stand-in where there are no matrices.

What makes it low rank is a reduction of its own, ``collectives/low_rank.py``, which knows rows and
columns. A flat tensor has none, so as a codec it is fp32: whatever cannot be a product of two thin
matrices is sent as it is.
"""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import torch

from hybridcomp.codecs._checks import check_dtype
from hybridcomp.codecs.casts import Cast
from hybridcomp.errors import CodecError

#: a matrix of n x m values is sent as factors when n * m is at least this many times their
#: rank * (n + m) values; below, the error buys too little (torch's hook: min_compression_rate)
LEAST_SAVING = 2.0


class PowerSgd(Cast):
    """Gradients as products of two matrices with ``rank`` columns; no bound on the error.

    Args:
        rank: columns of the factors, 1 or more. More: smaller error, larger messages.

    Raises:
        CodecError: ``rank`` is not a positive integer.

    Source: Vogels, Karimireddy, Jaggi: PowerSGD, NeurIPS 2019 (arXiv 1905.13727).
    """

    name: ClassVar[str] = "powersgd"
    _dtype = torch.float32

    def __init__(self, rank: int = 4) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise CodecError(f"powersgd: rank must be an integer from 1 up, found {rank!r}")
        self.rank = rank

    @cached_property
    def spec(self) -> str:
        return f"powersgd(rank={self.rank})"

    def worthwhile(self, rows: int, columns: int) -> bool:
        """Whether a matrix is sent as factors; otherwise its values are sent."""
        return self.rank * (rows + columns) * LEAST_SAVING <= rows * columns

    def element_bound(self, absmax: float, dtype: torch.dtype) -> float:
        """0.0, of a flat tensor; the low-rank reduction of matrices has no bound."""
        check_dtype(self.spec, dtype)
        return 0.0
