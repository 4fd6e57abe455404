"""Shared by tests of publishing."""

from __future__ import annotations

import pytest

from tests.ranks import RunRanks


@pytest.fixture(scope="session")
def versions(on_ranks: RunRanks) -> list[bytes]:
    """Return the bytes of each of four versions that two ranks sent on a stream."""
    from tests.publishing.made import streamed  # which looks for --nightly

    found: list[bytes] = on_ranks(2, streamed)[0]
    return found
