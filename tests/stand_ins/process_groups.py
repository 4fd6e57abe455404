"""Stand-in for a process group that sends nothing: its size and this rank, and no backend."""

from __future__ import annotations

from typing import Any


class FakeGroup:
    """What a ``ProcessGroup`` says of itself."""

    def __init__(self, size: int = 2, rank: int = 0) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        """Ranks in it."""
        return self._size

    def rank(self) -> int:
        """Which of them this is."""
        return self._rank


def fake_group(size: int = 2, rank: int = 0) -> Any:
    """One that is accepted where a ``ProcessGroup`` is expected."""
    return FakeGroup(size, rank)
