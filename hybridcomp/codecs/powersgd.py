"""powersgd: a low-rank reduction instead of a codec.

Its property ``low_rank`` selects the reduction of ``collectives/low_rank.py``, which sums gradient
matrices as factors. As a codec it encodes the values outside matrices: it sends them in fp32, since
a flat tensor has no rows and columns.
"""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import torch

from hybridcomp.codecs.casts import Cast
from hybridcomp.codecs.checks import check_dtype
from hybridcomp.codecs.low_rank import LowRank
from hybridcomp.codecs.setting import Setting


class PowerSgd(Cast):
    """Send gradients as products of two matrices with ``rank`` columns; no bound on the error.

    Args:
        rank: columns of the factors, 1 or more. More: smaller error, larger messages.

    Raises:
        CodecError: ``rank`` is not a positive integer.

    Source: Vogels, Karimireddy, Jaggi: PowerSGD, NeurIPS 2019 (arXiv 1905.13727).
    """

    name: ClassVar[str] = "powersgd"
    about: ClassVar[str] = (
        "matrices as products of two thin ones of `rank` columns; its error has no bound, and what "
        "it leaves out comes with the next step"
    )
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(
            "rank",
            int,
            "powersgd: columns of the two factors of a matrix, 1 or more, default 4. More: "
            "smaller error, larger messages.",
            least=1,
        ),
    )
    gradients_only: ClassVar[bool] = True
    _dtype = torch.float32

    def __init__(self, rank: int = 4) -> None:
        self.check_settings(rank=rank)
        self.rank = rank
        self.low_rank = LowRank(rank, self.spec)

    @cached_property
    def spec(self) -> str:
        return f"powersgd(rank={self.rank})"

    def cost_summary(self, *, summed: bool) -> str:
        return (
            f"{self.spec}, r(n+m)/nm of the fp32 bytes of an n x m gradient, no bound on the "
            "error, vectors and small matrices exact"
        )

    def element_bound(self, absmax: float, dtype: torch.dtype) -> float:
        """Return 0.0, for a flat tensor; the low-rank reduction of matrices has no bound."""
        check_dtype(self.spec, dtype)
        return 0.0
