"""Ranks that stay for the whole session: a launch for each of these tests would cost more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.ranks import RankPool

RunRanks = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def on_ranks() -> Iterator[RunRanks]:
    """``on_ranks(world_size, function, *args)`` as ``run_ranks``, on kept ranks."""
    pools: dict[int, RankPool] = {}

    def run(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        pool = pools.setdefault(world_size, RankPool(world_size))
        return pool.run(function, *args, timeout=60.0)

    yield run
    for pool in pools.values():
        pool.close()
