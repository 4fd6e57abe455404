"""Ranks that wait to be used are ended at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nccl.pool import RESERVE


@pytest.fixture(scope="session", autouse=True)
def reserve() -> Iterator[None]:
    """Nobody is left waiting."""
    yield
    RESERVE.close()
