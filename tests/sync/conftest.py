"""What tests of the rendezvous have in common."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a store on the loopback, of this process."""
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )
    yield store.port
    del store
