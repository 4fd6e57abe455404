"""Stand-in for a process group without a backend: its size and this rank."""

from __future__ import annotations

from typing import Any


class FakeGroup:
    """Properties of a ``ProcessGroup``."""

    def __init__(self, size: int = 2, rank: int = 0) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    def rank(self) -> int:
        """Return this rank."""
        return self._rank


def fake_group(size: int = 2, rank: int = 0) -> Any:
    """Return a fake typed as a ``ProcessGroup``."""
    return FakeGroup(size, rank)
