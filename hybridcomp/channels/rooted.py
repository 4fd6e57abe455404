"""Broadcasts and reductions to one rank of a channel, for hybridcomp's layers (``nn``).

No upstream code sends these messages, so where they have no codec the channel sends them natively.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.distributed import ProcessGroup

from hybridcomp import collectives
from hybridcomp.channels.moves import Moves
from hybridcomp.collectives import Handle, Meter, Transfer, native_nbytes
from hybridcomp.policy import Direction


class Rooted(Moves):
    """One dimension: broadcasts and reductions to one rank, encoded or native."""

    def broadcast(
        self, values: Tensor, root: int, group: ProcessGroup | None, *, direction: Direction
    ) -> tuple[Handle, Tensor]:
        """Broadcast ``values`` (1-D, contiguous) of group rank ``root`` to all ranks.

        On other ranks they are the buffer to receive into. Returns the handle, under way, and the
        tensor that holds the same bits on all ranks after ``wait()``: ``values``, except on the
        root of an encoded broadcast, where it is a new one.
        """
        known, meter = self.group(group), self.meter(values.device)
        numel, dtype, sends = values.numel(), values.dtype, known.rank == root
        raw_nbytes = native_nbytes.broadcast_nbytes(numel, dtype, known.size) if sends else 0
        codec = self.codec(numel, dtype, group, direction)
        if codec is None:
            handle = collectives.broadcast_native(values, root, known, meter, async_op=True)
            self.native(raw_nbytes, direction)
            return handle, values
        out = values.new_empty(numel) if sends else values
        if sends:
            self.sample(values, codec.hops(1, 1, result=dtype)[0], direction)
        via = Transfer(codec, known, meter)
        handle = collectives.broadcast(values if sends else None, out, root, via, async_op=True)
        share = len(known.remote) / max(1, known.size - 1)
        done = partial(self._landed, meter, raw_nbytes, direction, share)
        return handle.then(done), out

    def reduce(
        self,
        values: Tensor,
        out: Tensor | None,
        root: int,
        group: ProcessGroup | None,
        *,
        direction: Direction,
    ) -> Handle:
        """Sum ``values`` (1-D, contiguous) of all ranks into ``out`` (fp32 or wider) of ``root``.

        ``out`` is None elsewhere. Returns the handle, under way.
        """
        known, meter = self.group(group), self.meter(values.device)
        numel, dtype, sends = values.numel(), values.dtype, known.rank != root
        raw_nbytes = native_nbytes.send_nbytes(numel, dtype) if sends else 0
        codec = self.codec(numel, dtype, group, direction)
        if codec is None:
            self.native(raw_nbytes, direction)
            return collectives.reduce_native(values, out, root, known, meter, async_op=True)
        if sends:
            self.sample(values, codec.hops(1, known.size, exact=1)[0], direction)
        via = Transfer(codec, known, meter)
        handle = collectives.reduce(values, out, root, via, async_op=True)
        share = float(root in known.remote)
        return handle.then(partial(self._landed, meter, raw_nbytes, direction, share))

    def _landed(self, meter: Meter, raw_nbytes: int, direction: Direction, share: float) -> None:
        """Record a message: bytes and time on the ranks that send it, elsewhere its time only."""
        if raw_nbytes:
            self._record(meter, raw_nbytes, direction, share)
        else:
            self._state.ledger.record_time((self.dimension, direction), meter)
