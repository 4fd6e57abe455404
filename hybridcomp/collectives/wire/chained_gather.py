"""Gather payloads over several groups, one after the other, as if these were one group.

In more than two levels, a payload that has crossed to a site is forwarded, still encoded, to the
site's other nodes, so no link carries decoded values.
"""

from __future__ import annotations

from datetime import timedelta

from torch import Tensor
from torch.distributed import Work

from hybridcomp.collectives.wire import transport
from hybridcomp.collectives.wire.group import Group
from hybridcomp.collectives.wire.handle import Meter


def all_gather(out: Tensor, values: Tensor, group: Group, meter: Meter) -> Work:
    """Gather the ``values`` of all ranks, equally long, into ``out``, over the hops of ``group``.

    With several hops ``wait()`` posts all but the first, so all ranks must wait for their works in
    the same order.
    """
    if not group.hops:
        return transport.all_gather(out, values, group, meter)
    return _Relayed(out, values, group, meter)


class _Relayed(Work):
    """All-gather over the first hop, then gather its result over each next hop."""

    def __init__(self, out: Tensor, values: Tensor, group: Group, meter: Meter) -> None:
        super().__init__()
        self._out, self._group, self._meter = out, group, meter
        self._each, self._held, self._hop = values.numel(), 1, 0
        self._work: Work | None = self._posted(values)

    def _posted(self, values: Tensor) -> Work:
        """Post the gather of ``values``, the shards of ``_held`` ranks, over the next hop."""
        hop = self._group.hops[self._hop]
        self._hop, self._held = self._hop + 1, self._held * hop.size
        return transport.all_gather(self._block(), values, hop, self._meter)

    def _block(self) -> Tensor:
        """Return the part of ``out`` for the block of ``_held`` ranks that contains this rank."""
        first = self._group.rank // self._held * self._held
        return self._out[first * self._each : (first + self._held) * self._each]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Finish all hops; on NCCL this blocks the stream only."""
        while self._work is not None:
            work, self._work = self._work, None
            work.wait() if timeout is None else work.wait(timeout)
            if self._hop < len(self._group.hops):
                self._work = self._posted(self._block())
        return True
