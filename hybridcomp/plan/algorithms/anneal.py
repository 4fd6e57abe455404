"""A seeded Metropolis search over discrete choices, for spaces that are too large to enumerate."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: temperature at the start and the end, as a share of the first cost
HOT, COLD = 0.1, 1e-4


@dataclass(frozen=True)
class Annealed:
    """The best choices of all chains, and the best cost of every chain."""

    choices: tuple[int, ...]
    cost: float
    by_chain: tuple[float, ...]

    @property
    def spread(self) -> float:
        """Worst chain's best cost over the best one's, 1.0 where all chains agree."""
        return max(self.by_chain) / self.cost if self.cost else 1.0


def anneal(
    options: Sequence[int],
    cost: Callable[[tuple[int, ...]], float],
    *,
    seed: int = 0,
    chains: int = 4,
    proposals: int = 2000,
) -> Annealed:
    """Search ``choices`` with ``0 <= choices[i] < options[i]`` for the smallest ``cost``.

    Each chain begins at random choices, proposes another option at one place (at two in a quarter
    of the cases, since choices that depend on each other change together) and cools down from
    ``HOT`` to ``COLD``. ``cost`` may be ``math.inf`` for what cannot be; it is asked once for each
    different tuple. Equal seeds give equal results.
    """
    known: dict[tuple[int, ...], float] = {}

    def asked(choices: tuple[int, ...]) -> float:
        if choices not in known:
            known[choices] = cost(choices)
        return known[choices]

    ends = [_chain(options, asked, random.Random(f"{seed}/{index}"), proposals)
            for index in range(chains)]  # fmt: skip
    best, choices = min(ends)
    return Annealed(choices, best, tuple(end for end, _ in ends))


def _chain(
    options: Sequence[int],
    cost: Callable[[tuple[int, ...]], float],
    draw: random.Random,
    proposals: int,
) -> tuple[float, tuple[int, ...]]:
    """The best cost that one chain meets, and where."""
    now = tuple(draw.randrange(count) for count in options)
    current = cost(now)
    best, where = current, now
    free = [index for index, count in enumerate(options) if count > 1]
    for step in range(proposals if free else 0):
        scale = abs(best) if math.isfinite(best) and best else 1.0
        temperature = scale * HOT * (COLD / HOT) ** (step / proposals)
        proposed = _neighbour(now, options, free, draw)
        value = cost(proposed)
        if _accepts(current, value, temperature, draw):
            now, current = proposed, value
        if value < best:
            best, where = value, proposed
    return best, where


def _neighbour(
    now: tuple[int, ...], options: Sequence[int], free: Sequence[int], draw: random.Random
) -> tuple[int, ...]:
    changed = list(now)
    for index in draw.sample(free, min(len(free), 2 if draw.random() < 0.25 else 1)):
        other = draw.randrange(options[index] - 1)
        changed[index] = other + (other >= now[index])
    return tuple(changed)


def _accepts(current: float, value: float, temperature: float, draw: random.Random) -> bool:
    if value <= current:
        return True
    if math.isinf(value):
        return False
    return draw.random() < math.exp((current - value) / temperature)
