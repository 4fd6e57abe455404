"""Provide zeroed words for kernels without a memset for each launch.

Encoders of variable size need a few zeroed words. Allocating them with torch costs the host about
as much time as the rest of the launch, and the GPU one more kernel. So the words come from slabs
that are zeroed as a whole. No word is handed out twice, and a used-up slab is freed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

#: words of a slab (512 KB): a message of 16 MB takes 1 to 4 thousand
SLAB = 1 << 16


class Workspaces:
    """Slabs of one device; each stream has its own, so that it zeroes a slab before using it.

    Args:
        make: returns this many int64 zeros on the current stream.
    """

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        self._make = make
        self._slabs: dict[int, tuple[Tensor, int]] = {}  # slab and number of used words, by stream
        self._lock = threading.Lock()

    def take(self, words: int, stream: int) -> Tensor:
        """Return ``words`` zeros that are handed out only once; ``stream`` must be current."""
        if words > SLAB // 4:
            return self._make(words)
        with self._lock:
            slab, used = self._slabs.get(stream, (None, 0))
            if slab is None or used + words > SLAB:
                slab, used = self._make(SLAB), 0
            self._slabs[stream] = slab, used + words
        return slab[used : used + words]
