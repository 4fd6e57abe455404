"""Zeroed words for kernels, without a memset for each of them.

Encoders of variable size need a few words that are zero. Asking torch for them costs a host about
as much as all the rest of a launch, and a GPU one kernel more. So they are cut off slabs that were
zeroed at once; what was used is never given out again, and a slab that is used up is freed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

#: words of a slab (512 KB): a message of 16 MB takes 1 to 4 thousand
SLAB = 1 << 16


class Workspaces:
    """Slabs of one device, for each stream its own: what zeroes one is ordered before its users.

    Args:
        make: gives so many zeros, int64, on the stream that is current.
    """

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        self._make = make
        self._slabs: dict[int, tuple[Tensor, int]] = {}  # by stream, with the words used
        self._lock = threading.Lock()

    def take(self, words: int, stream: int) -> Tensor:
        """``words`` zeros that nobody else gets, on ``stream``, which is current."""
        if words > SLAB // 4:
            return self._make(words)
        with self._lock:
            slab, used = self._slabs.get(stream, (None, 0))
            if slab is None or used + words > SLAB:
                slab, used = self._make(SLAB), 0
            self._slabs[stream] = slab, used + words
        return slab[used : used + words]
