"""Reduce-scatter: shards of one tensor equal those of a list of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridcomp.channels import Channels
from hybridcomp.channels.residuals.pieces import Piece
from hybridcomp.channels.residuals.saved_residuals import held_in
from hybridcomp.collectives import Shards
from hybridcomp.config import CompressionConfig
from tests.channels import sent
from tests.ranks import RunRanks

SHARD = 96


def _both(hierarchy: Any, last: int, bits: int) -> tuple[bool, float]:
    """Return whether two steps have equal sums and residuals in both forms, and their squares."""
    me, ranks = dist.get_rank(), dist.get_world_size()
    lengths = [*[SHARD] * (ranks - 1), last]
    pieces = [[Piece(f"p{rank}", 0, numel)] for rank, numel in enumerate(lengths)]
    feedback = {"error_feedback": {"bits": bits}} if bits else {}
    dp = {"codec": "blockint", "bits": 4, **feedback}
    block: dict[str, Any] = {"dp": dp, "min_bytes": 0, "hierarchy": hierarchy}
    found = []
    for cut in (lambda flat: Shards(flat, SHARD), lambda flat: list(torch.split(flat, lengths))):
        channels = Channels(CompressionConfig.parse(block))
        channels.place([tuple(range(ranks))])
        codec = channels["dp"].codec(sum(lengths), torch.float32, None)
        assert codec is not None
        sums = []
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * me + step)
            shards = cut(torch.randn(sum(lengths), generator=generator))
            handle = sent.reduce_scatter(channels["dp"], shards, codec, None, pieces=pieces)
            sums.append(handle.wait())
        held = sorted(held_in(channels.residuals.state_dict()), key=lambda one: one[0])
        found.append((sums, [values for _, (_, values) in held]))
    (one, kept), (other, same) = found
    equal = all(torch.equal(a, b) for a, b in zip([*one, *kept], [*other, *same], strict=True))
    return equal, sum(float(values.square().sum()) for values in kept)


@pytest.mark.parametrize(("bits", "last"), [(0, 7), (32, SHARD), (32, 7), (8, 7)])
@pytest.mark.parametrize(("hierarchy", "ranks"), [("none", 4), (2, 4), ([2, 2], 8)], ids=str)
def test_forms_agree(hierarchy: Any, ranks: int, last: int, bits: int, on_ranks: RunRanks) -> None:
    for equal, held in on_ranks(ranks, _both, hierarchy, last, bits):
        assert equal and (held > 0) == (bits > 0)
