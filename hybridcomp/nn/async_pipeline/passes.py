"""Decide which micro-batch a pipeline stage works on next, and with which weights.

The schedule is 1F1B without a flush: the forward passes of stage s (of S stages) are
d = (S - 1 - s) (1 + slack) micro-batches ahead of its backward passes. A call for a batch of M
micro-batches ends with the last one's backward pass, so every stage makes one optimizer step per
call. By then, the stage has already run its first d forward passes of later batches. So at most
ceil(d / M) steps happen between a micro-batch's forward pass and its backward pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from hybridcomp.config.async_pipeline import Versions


class PassOrder:
    """Passes of one stage since the pipeline was last empty.

    Attributes:
        ahead: d, the micro-batches by which forward passes are ahead of backward passes.
        forwarded, backwarded: number of micro-batches whose forward or backward pass has begun.
        staleness: most steps by which the weights of a forward pass were older than the weights
            that its gradient updated.
    """

    def __init__(self, versions: Versions, ahead: int, micro_batches: int) -> None:
        self.versions, self.ahead, self.micro_batches = versions, ahead, micro_batches
        self.forwarded = self.backwarded = 0
        self.staleness = 0
        self._base = 0
        self._under_way: deque[int] = deque()

    @property
    def bound(self) -> int:
        """Return the largest staleness that may occur."""
        return 1 if self.versions == 2 else -(-self.ahead // self.micro_batches)

    def begin(self, newest: int) -> None:
        """Start with an empty stage whose weights are version ``newest``."""
        self.forwarded = self.backwarded = 0
        self._base = newest
        self._under_way.clear()

    def batch(self) -> Iterator[bool]:
        """Yield the passes of a batch, True for forward; the caller counts each as it runs."""
        last = self.backwarded + self.micro_batches
        while self.backwarded < last:
            yield self.forwarded <= self.backwarded + self.ahead

    def forward(self, newest: int) -> int:
        """Count a forward pass; return the weight version that it uses."""
        version = newest
        if self.versions == 2:
            batch = self._base + self.forwarded // self.micro_batches
            version = max(batch - 1, self._base)
        self.forwarded += 1
        self._under_way.append(version)
        return version

    def backward(self, newest: int) -> int:
        """Count a backward pass; return the weight version that it uses."""
        version = self._under_way.popleft()
        self.backwarded += 1
        self.staleness = max(self.staleness, newest - version)
        return newest if self.versions == 1 else version

    def needed(self, newest: int) -> set[int]:
        """Return the versions still needed after the next step, which creates a new version."""
        if self.versions == 1:
            return set()
        return {newest} if self.versions == 2 else set(self._under_way)
