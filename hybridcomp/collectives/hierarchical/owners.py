"""The reduction to owners in two levels; ``hierarchy`` says what is native and what is encoded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import owners
from hybridcomp.collectives.hierarchical.node_grid import Levels, exchange_inside
from hybridcomp.collectives.hierarchical.two_levels import Probe, node_sum, stretch
from hybridcomp.collectives.owner_plan import OwnedRange
from hybridcomp.collectives.wire.buffers import POOL
from hybridcomp.collectives.wire.chunks import chunk_ranges
from hybridcomp.collectives.wire.handle import Pending, Steps
from hybridcomp.collectives.wire.meter import Meter


def reduce_to_owners(
    tensor: Tensor,
    ranges: Sequence[OwnedRange],
    codec: Codec,
    levels: Levels,
    *,
    meter: Meter,
    residual: Tensor | None = None,
    owner_residual: Tensor | None = None,
    cuts: Sequence[int] = (),
    probe: Probe | None = None,
) -> list[Tensor]:
    """``collectives.reduce_to_owners`` over nodes and inside them.

    Residuals and cuts as for ``hierarchy.all_reduce``; ``owner_residual`` is used where
    ``plan_reduction`` of ``ranges_of_nodes`` is balanced.
    """
    codec = codec.summing(levels.width)
    steps = _reduce_to_owners(
        tensor.detach(), ranges, codec, levels, meter, residual, owner_residual, cuts, probe
    )
    return Pending(steps, meter, False).wait()


def _reduce_to_owners(
    tensor: Tensor,
    ranges: Sequence[OwnedRange],
    codec: Codec,
    levels: Levels,
    meter: Meter,
    residual: Tensor | None,
    owner_residual: Tensor | None,
    cuts: Sequence[int],
    probe: Probe | None,
) -> Steps[list[Tensor]]:
    """1 sum my stretch inside the node, 2 send the sums to the owners' nodes, 3 hand them on."""
    lengths = [stop - start for start, stop in chunk_ranges(tensor.numel(), levels.width)]
    # 1
    buffer, work = yield from node_sum(tensor, lengths, codec, levels, meter, probe)
    # 2
    sums = owners.reduce_to_owners(
        work,
        ranges_of_nodes(ranges, stretch(tensor.numel(), levels), levels),
        codec,
        levels.outer,
        meter=meter,
        residual=residual,
        owner_residual=owner_residual,
        cuts=cuts,
    )
    # 3
    results = yield from _hand_on(ranges, tensor, sums, levels, meter)
    POOL.give(buffer)
    return results


def ranges_of_nodes(
    ranges: Sequence[OwnedRange], within: tuple[int, int], levels: Levels
) -> list[OwnedRange]:
    """The ranges inside the stretch ``within``, from its start, with nodes for owners."""
    node_of = {rank: node for node, row in enumerate(levels.grid) for rank in row}
    return [
        OwnedRange(low - within[0], high - within[0], tuple(sorted({node_of[r] for r in owners})))
        for low, high, owners in _inside(ranges, within)
    ]


def _inside(
    ranges: Sequence[OwnedRange], within: tuple[int, int]
) -> list[tuple[int, int, tuple[int, ...]]]:
    cut = [(max(r.start, within[0]), min(r.stop, within[1]), r.ranks) for r in ranges]
    return [part for part in cut if part[0] < part[1]]


def _hand_on(
    ranges: Sequence[OwnedRange],
    tensor: Tensor,
    sums: Sequence[Tensor],
    levels: Levels,
    meter: Meter,
) -> Steps[list[Tensor]]:
    """Send ``sums`` (of my stretch, needed on this node) to their owners here, in fp32.

    Returns the sum of every range that this rank owns, in order.
    """
    mates = levels.grid[levels.node]
    me = mates[levels.local]
    stretches = chunk_ranges(tensor.numel(), levels.width)
    #: by local rank: the parts of its stretch that this node needs
    needed = [[p for p in _inside(ranges, s) if set(p[2]) & set(mates)] for s in stretches]
    own = list(zip(needed[levels.local], sums, strict=True))
    arrived = yield from exchange_inside(
        [[total for part, total in own if mate in part[2]] for mate in mates],
        [[high - low for low, high, ranks in row if me in ranks] for row in needed],
        tensor.device,
        levels,
        meter,
    )
    results = [
        (owned, tensor.new_empty(owned.stop - owned.start, dtype=torch.float32))
        for owned in ranges
        if me in owned.ranks
    ]
    parts = [(low, high) for row in needed for low, high, ranks in row if me in ranks]
    for (low, high), total in zip(parts, (t for row in arrived for t in row), strict=True):
        for owned, out in results:
            if owned.start <= low and high <= owned.stop:
                out[low - owned.start : high - owned.start].copy_(total)
    return [out for _, out in results]
