"""The step that ends error feedback sends all residuals, also with 16-bit gradients.

All values are multiples of 2^-10 below 2^10, so that fp32 sums of them are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridcomp.channels import Channels
from hybridcomp.channels.residuals.pieces import Piece, cut
from hybridcomp.codecs import LOSSLESS
from hybridcomp.collectives import OwnedRange, chunk_ranges
from hybridcomp.config import CompressionConfig
from tests.channels import sent
from tests.collectives.calls import group_of
from tests.collectives.hierarchical.in_threads import deep_groups, units_of
from tests.stand_ins import thread_groups
from tests.stand_ins.thread_groups import Member

NUMEL = 999
PIECE = Piece("p", 0, NUMEL)
GROUP: Any = "the group of the test"
BLOCK = {"dp": {"codec": "blockint", "bits": 4, "error_feedback": True}, "min_bytes": 0}


def encoded(kind: str, rank: int, shares: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """Return the values that ``rank`` encodes in two levels, of nodes of two ranks."""
    if kind == "reduce_scatter":
        return shares[rank % 2 :: 2]
    return [chunk_ranges(NUMEL, 2)[rank % 2]]


def flushed(kind: str, size: int, deep: bool) -> tuple[Tensor, Tensor, float]:
    """Return the sum of all gradients and residuals, the applied sum, and the residuals left."""
    torch.manual_seed(size)
    gradients = torch.randint(-64, 64, (size, NUMEL)).bfloat16()
    residuals = torch.randint(-1023, 1024, (size, NUMEL)) / 1024
    every = [Channels(CompressionConfig.parse(BLOCK)) for _ in range(size)]
    _, levels_of, boards = deep_groups(units_of([2], size)) if deep else (None, None, [])
    shares = chunk_ranges(NUMEL, size)
    held = torch.zeros(NUMEL)

    def one(member: Member, rank: int) -> Tensor:
        channels = every[rank]
        channels.step = 1  # no sample
        channel, codec = channels["dp"], LOSSLESS
        group = group_of(levels_of(rank) if levels_of else member)
        channel.groups[GROUP, channel.state.nodes] = group
        values = gradients[rank].clone()
        if kind == "all_reduce":
            sent.all_reduce(channel, values, codec, GROUP, pieces=[PIECE]).wait()
            return values.float()
        if kind == "reduce_scatter":
            shards = [values[low:high] for low, high in shares]
            of = [cut([PIECE], low, high) for low, high in shares]
            return sent.reduce_scatter(channel, shards, codec, GROUP, pieces=of).wait()
        ranges = [OwnedRange(low, high, (rank,)) for rank, (low, high) in enumerate(shares)]
        if kind == "one owner":
            ranges = [OwnedRange(0, NUMEL, (0,))]
        sums = sent.reduce_to_owners(channel, values, ranges, codec, GROUP, pieces=[PIECE])
        return torch.cat(sums) if sums else torch.zeros(0)

    for rank, channels in enumerate(every):
        for low, high in encoded(kind, rank, shares) if deep else [(0, NUMEL)]:
            held[low:high] += residuals[rank, low:high]
            channels.residuals.add("p", (low, residuals[rank, low:high].clone()))
    found = thread_groups.run(size, one, boards)
    applied = found[0] if kind == "all_reduce" else torch.cat(found)
    return gradients.float().sum(0) + held, applied, max(c.residuals.norm() for c in every)


@pytest.mark.parametrize(("size", "deep"), [(1, False), (2, False), (3, False), (4, True)])
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "owners", "one owner"])
def test_nothing_is_left_out_of_a_flush(kind: str, size: int, deep: bool) -> None:
    """fp32 sums are exact; bf16 sums are rounded once, at the end."""
    due, applied, left = flushed(kind, size, deep)
    if kind == "all_reduce":
        assert torch.equal(applied, due.bfloat16().float())
        return
    assert torch.equal(applied, due)
    assert left == 0
