"""Read the weights that this rank publishes, with their last published values and a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridcomp.errors import PublishError
from hybridcomp.publishing.checksums import compare
from hybridcomp.publishing.weight_ranges import WeightRange
from hybridcomp.publishing.weights import NAMES, PATTERNS, Owned

#: values of new memory that are written at once
TOUCHED = 1 << 20


@dataclass
class Shard:
    """One owned part, with a copy of its last published values, by pieces.

    A version written in the background gets a copy of its own, the snapshot, which then replaces
    the copy of the last published values.
    """

    owned: Owned
    kind: str
    dtype: torch.dtype = field(init=False)
    stretch: WeightRange = field(init=False)
    reference: Tensor | None = None
    digests: list[str] = field(default_factory=list)
    snapshot: Tensor | None = None  # weights of the version that is written in the background
    is_on_host: bool = True  # whether the weights were on the host when the snapshot began

    def __post_init__(self) -> None:
        self.stretch, self.dtype = self.owned.stretch, PATTERNS[self.kind]

    def pieces(self, bucket: int) -> Iterator[tuple[int, int]]:
        """Yield the bounds of the shard's pieces, of at most ``bucket`` values."""
        return self.stretch.pieces(bucket)

    def values(self, low: int, high: int) -> Tensor:
        """Return current values ``low`` to ``high`` on the host, in the published dtype."""
        some = self._now(low, high).to("cpu", self.dtype)
        # torch considers a single value contiguous whatever its stride, but cannot view it as bytes
        # then
        return some.contiguous() if len(some) != 1 else some.clone().as_strided((1,), (1,))

    def _now(self, low: int, high: int) -> Tensor:
        """Return current values ``low`` to ``high``, 1-D, on their own device."""
        held, begin = self.owned.held, self.owned.low
        if held.part is not None:
            return held.part(begin + low, begin + high)
        found = held.read().detach()
        if found.numel() != held.stretch.numel:
            raise PublishError(
                f"{self.stretch.name}: expected {held.stretch.numel} values on this rank, found "
                f"{found.numel()}; start a new Publisher where parameters change their sizes"
            )
        if found.dtype != self.dtype and found.dtype in NAMES:
            raise PublishError(
                f"{self.stretch.name}: expected {NAMES[self.dtype]}, in which it is published, "
                f"found {NAMES[found.dtype]}; start a new Publisher, to an empty folder"
            )
        return found.reshape(-1)[begin + low : begin + high]

    def begin_snapshot(self, bucket: int) -> torch.device:
        """Copy weights that are on a device, on its current stream; return the device.

        Weights on the host are left to ``end_snapshot``.
        """
        place = self.owned.held.read().device
        self.is_on_host = place.type == "cpu"
        if self.snapshot is None:
            is_pinned = place.type == "cuda"
            self.snapshot = torch.empty(
                self.stretch.numel, dtype=self.dtype, pin_memory=is_pinned, device="cpu"
            )
        for low, high in () if self.is_on_host else self.pieces(bucket):
            is_ordered = place.type == "cuda"
            self.snapshot[low:high].copy_(self._now(low, high), non_blocking=is_ordered)
        return place

    def make_room(self, is_ended: Callable[[], bool] = lambda: False) -> None:
        """Allocate the next snapshot and touch its pages, so that training need not wait for them.

        Copying to new pages takes six times as long. Weights on a device get no memory here. The
        method stops soon after ``is_ended`` returns True; the remaining pages stay new.
        """
        if self.snapshot is None and self.is_on_host:
            self.snapshot = torch.empty(self.stretch.numel, dtype=self.dtype, device="cpu")
            for low in range(0, len(self.snapshot), TOUCHED):
                if is_ended():
                    break
                self.snapshot[low : low + TOUCHED].fill_(0)

    def end_snapshot(self, bucket: int) -> None:
        """Copy weights that are on the host."""
        assert self.snapshot is not None
        for low, high in self.pieces(bucket) if self.is_on_host else ():
            self.snapshot[low:high].copy_(self.values(low, high))

    def check_snapshot(self, bucket: int) -> None:
        """Raise PublishError if weights on the host have changed since the snapshot."""
        assert self.snapshot is not None
        for low, high in self.pieces(bucket) if self.is_on_host else ():
            now, then = self.values(low, high), self.snapshot[low:high]
            if compare(now, then)[0]:
                raise PublishError(
                    f"{self.stretch.name}: it was changed while it was being copied beside the "
                    "training; call publisher.copied() before anything but an optimizer of torch "
                    "changes weights, or publish with wait=True; the next version is a full one"
                )
