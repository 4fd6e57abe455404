"""PassOrder: which micro-batch a stage works on next, and with which weights.

One forward, one backward, without an end: of S stages, stage s is d = (S - 1 - s) (1 + slack)
micro-batches further with its passes forward than with those backward. A call for one batch of M
micro-batches ends with the pass backward of the last of them, so every stage makes one optimizer
step a call; its first passes forward of the next batch are made by then. A pass forward thus misses
ceil(d / M) steps at most that are made before its pass backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from hybridcomp.config.async_pipeline import Versions


class PassOrder:
    """Passes of one stage since it was last empty.

    Attributes:
        ahead: micro-batches that passes forward are ahead, d.
        forwarded, backwarded: micro-batches whose passes have been begun.
        staleness: the most steps by which the weights of a pass forward were older than those that
            its gradient has changed.
    """

    def __init__(self, versions: Versions, ahead: int, micro_batches: int) -> None:
        self.versions, self.ahead, self.micro_batches = versions, ahead, micro_batches
        self.forwarded = self.backwarded = 0
        self.staleness = 0
        self._base = 0
        self._under_way: deque[int] = deque()

    @property
    def bound(self) -> int:
        """Largest staleness that may occur."""
        return 1 if self.versions == 2 else -(-self.ahead // self.micro_batches)

    def begin(self, newest: int) -> None:
        """Begin with an empty stage whose weights are version ``newest``."""
        self.forwarded = self.backwarded = 0
        self._base = newest
        self._under_way.clear()

    def batch(self) -> Iterator[bool]:
        """Yield the passes of one batch, True for forward, as long as the caller counts them."""
        last = self.backwarded + self.micro_batches
        while self.backwarded < last:
            yield self.forwarded <= self.backwarded + self.ahead

    def forward(self, newest: int) -> int:
        """Count a pass forward; return the version that it computes with."""
        version = newest
        if self.versions == 2:
            batch = self._base + self.forwarded // self.micro_batches
            version = max(batch - 1, self._base)
        self.forwarded += 1
        self._under_way.append(version)
        return version

    def backward(self, newest: int) -> int:
        """Count a pass backward; return the version that it computes with."""
        version = self._under_way.popleft()
        self.backwarded += 1
        self.staleness = max(self.staleness, newest - version)
        return newest if self.versions == 1 else version

    def needed(self, newest: int) -> set[int]:
        """Return the versions that are needed after the next step, which makes another newest."""
        if self.versions == 1:
            return set()
        return {newest} if self.versions == 2 else set(self._under_way)
