"""Pass a flat tensor from rank to rank, with the interface of torch's own ring attention.

Torch's ``context_parallel`` computes the blocks and the sums itself and asks a *rotater* for the
tensor of the previous rank. Keys and values do not change on the way, so each rank forwards the
received payload. Gradient sums change at every rank, so each rank encodes them again: with N ranks,
the first addend is rounded N - 1 times. ``ring_attention`` instead sends gradients directly to
their owners.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybridcomp.collectives.ring import PackedMessage, Ring
from hybridcomp.collectives.wire.handle import Pending
from hybridcomp.dimensions import Direction
from hybridcomp.nn.context.traffic import RingTraffic


class Rotater:
    """Pass each rank's tensor round the ring, with the methods of torch's ``_RingRotater``.

    Args:
        traffic: sends the messages; must have channels.
        direction: ``forward`` for keys and values, ``backward`` for sums of their gradients.
        make_native: creates torch's own rotater, for messages without a codec.
    """

    def __init__(
        self, traffic: RingTraffic, direction: Direction, make_native: Callable[[], Any]
    ) -> None:
        self._traffic, self._direction = traffic, direction
        self._make_native = make_native
        self._native: Any = None
        self._ring: Ring | None = None
        self._held: PackedMessage | None = None
        self._coming: Pending[PackedMessage | None] | None = None
        self._shape, self._dtype = torch.Size(), torch.float32

    def exchange_buffers(self, curr_buffer: Tensor) -> None:
        """Send ``curr_buffer``, or the payload from which it was decoded, to the next rank."""
        values = curr_buffer.detach().contiguous()
        if self._ring is None and self._native is None:
            self._choose(values)
        if self._native is not None:
            self._traffic.count_native(values.nbytes, self._direction)
            self._native.exchange_buffers(curr_buffer)
            return
        ring = self._ring
        assert ring is not None
        if self._held is None or self._direction == "backward":
            self._held = ring.pack([values.view(-1)])
        self._shape, self._dtype = values.shape, values.dtype
        self._coming = ring.shift(self._held, 1, self._held.contents)

    def next_buffer(self) -> Tensor:
        """Wait for the previous rank's tensor and return it, decoded."""
        if self._native is not None:
            buffer: Tensor = self._native.next_buffer()
            return buffer
        ring, coming = self._ring, self._coming
        assert ring is not None and coming is not None
        self._coming, came = None, coming.wait()
        assert came is not None
        out = torch.empty(self._shape, dtype=self._dtype, device=ring.device)
        ring.open(came, 0, out.view(-1))
        self._held = came
        self._traffic.record_ring_traffic(ring, out.nbytes, self._direction)
        # a new meter for the next message
        ring.meter = self._traffic.ring(ring.codec, ring.device).meter
        return out

    def _choose(self, values: Tensor) -> None:
        codec = self._traffic.codec(values.numel(), values.dtype, self._direction)
        if codec is None:
            self._native = self._make_native()
            return
        self._traffic.sample(values.view(-1), codec, self._direction)
        self._ring = self._traffic.ring(codec, values.device)
