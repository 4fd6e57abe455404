"""Shared by tests of the rendezvous."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]


@pytest.fixture
def port() -> Iterator[int]:
    """Return a free loopback port for a store of this process."""
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )
    yield store.port
    del store
