"""Collectives of layers as torch.distributed has them: strides, splits, vectors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridcomp.channels import Channels
from hybridcomp.config import CompressionConfig
from hybridcomp.patches.common import collective_wrappers
from hybridcomp.patches.common.routes import Layers
from tests.ranks import RunRanks


def exchanged(later: bool) -> tuple[bool, bool, bool, tuple[int, int]]:
    """Sum a transposed tensor, and exchange vectors and rows with splits.

    Returns whether the sum is in place, whether vectors are exact, whether rows are, and how many
    messages were counted and stayed native.
    """
    block = {"tp": {"codec": "blockint", "bits": 8}, "min_bytes": 4096}
    channels = Channels(CompressionConfig.parse(block))
    layers = Layers(lambda group: "tp", lambda: "forward", lambda: channels)

    def wrapped(name: str) -> Any:
        real = getattr(dist, name)
        send = getattr(collective_wrappers, f"make_{name}")(layers)(real)

        def both(*given: Any, **how: Any) -> None:
            handle = send(*given, **how, async_op=later)
            if later:
                handle.wait()

        return both

    rank = dist.get_rank()
    base = torch.full((64, 48), 1.0 + rank)
    wrapped("all_reduce")(base.t())
    strided = torch.allclose(base, torch.tensor(3.0), rtol=0.02)

    splits = ([3, 1], [2, 4])[rank]  # rows that this rank sends to each
    got = ([3, 2], [1, 4])[rank]
    exact = []
    for shape in ((), (32,)):
        values = torch.randn(sum(splits), *shape, generator=torch.Generator().manual_seed(rank))
        out, expected = (torch.empty(sum(got), *shape) for _ in range(2))
        dist.all_to_all_single(expected, values, got, splits)
        wrapped("all_to_all_single")(out, values, got, splits)
        assert torch.allclose(out, expected, atol=0.05)
        exact.append(torch.equal(out, expected))
    entry = channels.ledger.interval["tp", "forward"]
    return strided, exact[0], exact[1], (int(entry.messages), int(entry.native))


@pytest.mark.parametrize("later", [False, True], ids=["at once", "asynchronously"])
def test_strides_and_splits(on_ranks: RunRanks, later: bool) -> None:
    """``min_bytes`` does not hold for rows with splits, whose number differs from rank to rank."""
    assert on_ranks(2, exchanged, later) == [(True, True, False, (3, 1))] * 2
