"""A group of ranks as nodes times local ranks, and the native messages inside a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hybridcomp.collectives.wire import transport
from hybridcomp.collectives.wire.buffers import POOL
from hybridcomp.collectives.wire.handle import Steps
from hybridcomp.collectives.wire.meter import Meter


@dataclass(frozen=True)
class Levels:
    """Where this rank stands in a group that has equally many ranks on each of its nodes."""

    grid: tuple[tuple[int, ...], ...]  # group ranks by node, then by local index
    node: int  # the row of this rank
    local: int  # its column
    inner: ProcessGroup  # the ranks of this node, by local index
    outer: ProcessGroup  # the ranks with this local index, by node

    @property
    def nodes(self) -> int:
        return len(self.grid)

    @property
    def width(self) -> int:
        """Ranks of a node."""
        return len(self.grid[0])


def sum_inside(
    values: Tensor, lengths: Sequence[int], levels: Levels, meter: Meter
) -> Steps[tuple[Tensor, Tensor]]:
    """Sum over the node: ``(buffer to give back, fp32 sum of this rank's stretch)``.

    ``values`` (1-D, contiguous) holds a stretch of ``lengths[l]`` elements for every local rank l.
    They travel as they are and are summed in fp32 in local order: an all-to-all costs the bytes of
    a reduce-scatter, and no 16-bit rounding of partial sums.
    """
    mine, size = lengths[levels.local], values.dtype.itemsize
    wire = POOL.take(levels.width * mine * size, values.device)
    received = wire[: levels.width * mine * size]
    meter.sent((values.numel() - mine) * size)
    yield from transport.all_to_all(
        received,
        values.view(torch.uint8),
        [mine * size] * levels.width,
        [length * size for length in lengths],
        levels.inner,
    )
    buffer, total = POOL.take_fp32(mine, values.device)
    with meter.coding():
        first, *others = received.view(values.dtype).view(levels.width, mine)
        total.copy_(first)
        for row in others:
            total.add_(row)
    POOL.give(wire)
    return buffer, total


def gather_inside(
    shard: Tensor, lengths: Sequence[int], levels: Levels, meter: Meter
) -> Steps[tuple[Tensor, list[Tensor]]]:
    """Gather over the node: ``(buffer to give back, values by local rank)``.

    ``shard``: ``lengths[levels.local]`` elements; slots are as long as the longest.
    """
    slot, size = max(lengths), shard.dtype.itemsize
    padded = shard
    if shard.numel() < slot:
        padded = torch.cat([shard, shard.new_zeros(slot - shard.numel())])
    wire = POOL.take(levels.width * slot * size, shard.device)
    gathered = wire[: levels.width * slot * size]
    meter.sent((levels.width - 1) * slot * size)
    yield from transport.all_gather(gathered, padded.view(torch.uint8), levels.inner)
    rows = gathered.view(shard.dtype).view(levels.width, slot)
    return wire, [row[:length] for row, length in zip(rows, lengths, strict=True)]


def exchange_inside(
    rows: Sequence[Sequence[Tensor]],
    numels: Sequence[Sequence[int]],
    device: torch.device,
    levels: Levels,
    meter: Meter,
) -> Steps[list[list[Tensor]]]:
    """Send ``rows[l]`` to local rank l; returns what came, by local rank, ``numels[l]`` long.

    All fp32. What a rank sends to itself is handed through.
    """
    me = levels.local
    gives = [sum(part.numel() for part in row) if i != me else 0 for i, row in enumerate(rows)]
    takes = [sum(row) if i != me else 0 for i, row in enumerate(numels)]
    parts = [part for i, row in enumerate(rows) for part in row if i != me]
    sent = torch.cat(parts) if parts else torch.empty(0, device=device)
    received = torch.empty(sum(takes), dtype=torch.float32, device=device)
    meter.sent(sent.nbytes)
    yield from transport.all_to_all(
        received.view(torch.uint8),
        sent.view(torch.uint8),
        [4 * n for n in takes],
        [4 * n for n in gives],
        levels.inner,
    )
    stretches = torch.split(received, takes)
    return [
        list(rows[me]) if i == me else list(torch.split(stretch, list(row)))
        for i, (stretch, row) in enumerate(zip(stretches, numels, strict=True))
    ]
