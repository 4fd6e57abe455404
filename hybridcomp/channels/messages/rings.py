"""Send messages of ring attention round a group; record them once the ring has finished."""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from hybridcomp.channels.channel import Channel
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.ring import Ring
from hybridcomp.dimensions import Direction


def ring_of(
    channel: Channel, codec: Codec | None, group: ProcessGroup | None, device: torch.device
) -> Ring:
    """Return the ``Ring`` that sends messages round ``group``, with its own meter.

    ``codec``: from ``Channel.codec``. Call ``record_ring`` once the ring has finished.
    """
    return Ring(codec, channel.group(group), channel.meter(device), device)


def record_ring(channel: Channel, ring: Ring, raw_nbytes: int, direction: Direction) -> None:
    """Record the messages of a finished ring; ``raw_nbytes``: bytes native would have sent.

    Without a codec the ring sends exactly these bytes, plus headers.
    """
    if ring.codec is None:
        channel.count_native(raw_nbytes, direction)
        channel.state.ledger.record_time((channel.dimension, direction), ring.meter)
        return
    ring.meter.used[ring.codec.spec] = None
    channel.record(ring.meter, raw_nbytes, direction, ring.group.ring)
