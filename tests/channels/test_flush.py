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
from hybridcomp.collectives import Group, Levels, OwnedRange, chunk_ranges
from hybridcomp.config import CompressionConfig
from tests.channels import sent
from tests.stand_ins import thread_groups
from tests.stand_ins.thread_groups import Board, Member

NUMEL = 999
PIECE = Piece("p", 0, NUMEL)
GROUP: Any = "the group of the test"
BLOCK = {"dp": {"codec": "blockint", "bits": 4, "error_feedback": True}, "min_bytes": 0}


def members(member: Member, rank: int, size: int, boards: list[Board] | None) -> Group:
    """Return the group of ``rank``: one level, or with ``boards`` two nodes of two ranks."""
    if boards is None:
        return Group(member, rank, size)  # type: ignore[arg-type]
    node, local = divmod(rank, 2)
    levels = Levels(
        ((0, 1), (2, 3)), node, local,
        Group(Member(boards[node], local), local, 2),  # type: ignore[arg-type]
        Group(Member(boards[2 + local], node), node, 2),  # type: ignore[arg-type]
    )  # fmt: skip
    return Group(levels.inner.process_group, rank, 4, levels=levels)


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
    boards = [Board(2) for _ in range(4)] if deep else None
    shares = chunk_ranges(NUMEL, size)
    held = torch.zeros(NUMEL)

    def one(member: Member, rank: int) -> Tensor:
        channels = every[rank]
        channels.step = 1  # no sample
        channel, codec = channels["dp"], channels.guard.lossless
        channel.groups[GROUP, channel.state.nodes] = members(member, rank, size, boards)
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
    with thread_groups.in_process():
        found = thread_groups.run(size, one)
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
