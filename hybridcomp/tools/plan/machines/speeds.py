"""Compare the compute speeds of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from hybridcomp.tools.plan.machines.rows import Kernel, Rank


def speeds_of(ranks: Sequence[Rank], kernels: Sequence[Kernel]) -> tuple[float, ...]:
    """Return the speed of every rank relative to the fastest (1.0).

    It is the median over transformer blocks, else over matrix products, else over FLOP/s. A rank
    without any measurement counts as the fastest.
    """
    for kinds in (("block_forward", "block_backward"), ("product",)):
        times = _times(kernels, kinds)
        if times:
            return _relative(times, len(ranks))
    rates: dict[str, dict[int, float]] = {}
    for index, rank in enumerate(ranks):
        for dtype, rate in rank.flops.items():
            if rate.value:
                rates.setdefault(dtype, {})[index] = 1 / rate.value
    return _relative(list(rates.values()), len(ranks))


def dtypes_of(ranks: Sequence[Rank], kernels: Sequence[Kernel]) -> frozenset[str]:
    """Return the dtypes of matrix products, or of blocks, that every rank has a figure for."""
    known = [set(rank.flops) for rank in ranks]
    for row in kernels:
        if row.kind in ("product", "block_forward") and row.rank < len(known):
            known[row.rank].add(row.dtype)
    return frozenset(set.intersection(*known))


def _times(kernels: Sequence[Kernel], kinds: tuple[str, ...]) -> list[dict[int, float]]:
    """Return the seconds by rank of each kernel that was timed."""
    found: dict[tuple[str, str, float], dict[int, float]] = {}
    for row in kernels:
        if row.kind in kinds and row.seconds.value:
            found.setdefault((row.kind, row.dtype, row.size), {})[row.rank] = row.seconds.value
    return list(found.values())


def _relative(times: Sequence[dict[int, float]], count: int) -> tuple[float, ...]:
    ratios: list[list[float]] = [[] for _ in range(count)]
    for seconds in times:
        fastest = min(seconds.values())
        for rank, own in seconds.items():
            ratios[rank].append(fastest / own)
    middle = [median(own) if own else 1.0 for own in ratios]
    top = max(middle, default=1.0)
    return tuple(one / top for one in middle)
