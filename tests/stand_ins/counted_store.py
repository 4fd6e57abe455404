"""A store that counts a rank's requests."""

from __future__ import annotations

from collections import Counter
from typing import Any


class CountedStore:
    """Forwards every call to ``store``, and counts it by name."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if not callable(method):
            return method

        def counted(*arguments: Any) -> Any:
            self.calls[name] += 1
            return method(*arguments)

        return counted
