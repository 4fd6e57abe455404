"""Provide the session's ranks without the state of earlier tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hybridcomp.nn.tables import host_rows
from hybridcomp.session import process
from tests.ranks import RunRanks


def on_clean_rank(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function`` without a block, and restore the size of pieces that it may change."""
    process.configure(None)
    before = host_rows.PIECE_NBYTES
    try:
        return function(*args)
    finally:
        host_rows.PIECE_NBYTES = before


@pytest.fixture
def on_ranks(on_ranks: RunRanks) -> RunRanks:
    """``on_ranks`` of all tests: those before these may have left a block there."""

    def run(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        return on_ranks(world_size, on_clean_rank, function, *args)

    return run
