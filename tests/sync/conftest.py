"""Shared by tests of the rendezvous."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sync.jobs import store


@pytest.fixture
def port() -> Iterator[int]:
    """Return the loopback port of a store of this process."""
    with store() as found:
        yield found
