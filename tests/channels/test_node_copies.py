"""Secondary shards: slices and columns on grids of ranks, deltas and full shards, bytes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp import collectives
from hybridcomp.channels import Channels
from hybridcomp.channels.messages.node_copies import CopyGroups, gather_inside, renew
from hybridcomp.collectives import Transfer, gather_payloads
from hybridcomp.collectives.topology import Nodes
from hybridcomp.collectives.wire import chunking, message_rounds
from hybridcomp.collectives.wire.encoding import POOL
from hybridcomp.config import CompressionConfig
from tests.collectives.hierarchical.in_threads import deep_groups, units_of
from tests.ranks import RunRanks
from tests.selection import by_day
from tests.stand_ins import thread_groups

#: nodes, ranks per node
GRIDS = ((2, 2), (2, 4), (3, 2), (4, 2), (3, 3), (2, 3), (5, 2))
NUMEL = 3000


def values_of(dtype: torch.dtype, ranks: int) -> Tensor:
    """Return all ranks' shards, (ranks, NUMEL)."""
    generator = torch.Generator().manual_seed(ranks)
    if dtype == torch.uint8:
        return torch.randint(256, (ranks, NUMEL), generator=generator, dtype=dtype)
    found = torch.randn(ranks, NUMEL, generator=generator).to(dtype)
    found[0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, 0.0])
    return found


def moved(values: Tensor) -> Tensor:
    """Change every tenth value by a unit in the last place."""
    bits = values.clone()
    view = bits if bits.dtype == torch.uint8 else bits.view(torch.int16)
    view[:, ::10] += 1
    return bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize(("nodes", "width"), by_day(GRIDS, [(2, 2), (3, 2), (2, 3)]))
def test_a_node_has_all_new_values(nodes: int, width: int, dtype: torch.dtype) -> None:
    ranks = nodes * width
    old = values_of(dtype, ranks)
    new = moved(old)
    _, levels_of, boards = deep_groups(units_of([width], ranks))

    def one(_: Any, rank: int) -> tuple[Tensor, Tensor, Tensor, list[int]]:
        groups = CopyGroups(Nodes([0] * ranks, ""), levels_of(rank))
        channel = Channels(CompressionConfig.parse({"zero": {"secondary": "exact"}}))["zero"]
        native = NUMEL, torch.bfloat16
        sent = []

        def counted() -> None:
            sent.append(int(channel.state.ledger.interval["zero", "forward"].inter_nbytes))

        held = renew(channel, groups, old[rank].clone(), None, native)
        counted()
        before = held.clone()
        table = renew(channel, groups, new[rank].clone(), held, native)
        counted()
        gathered = table.new_empty(ranks, NUMEL)
        gather_inside(channel, groups, table, native, True, gathered)
        entry = channel.state.ledger.interval["zero", "forward"]
        raw = 2 * (nodes - 1) * NUMEL * 2 + (ranks - nodes) * NUMEL * 2
        assert entry.raw_nbytes == raw
        return before, table, gathered, sent

    for rank, (before, table, gathered, sent) in enumerate(thread_groups.run(ranks, one, boards)):
        start = rank % width * nodes
        assert torch.equal(bits_of(before), bits_of(old[start : start + nodes]))
        assert torch.equal(bits_of(table), bits_of(new[start : start + nodes]))
        assert torch.equal(bits_of(gathered), bits_of(new))
        whole, steps = sent[0], sent[1] - sent[0]
        assert 0 < steps < 0.2 * whole, "a tenth of the values have moved"


def bits_of(values: Tensor) -> Tensor:
    return values if values.dtype == torch.uint8 else values.view(torch.int16)


def in_rounds(dtype: torch.dtype) -> list[int]:
    """Renew a copy twice in several messages; return their numbers."""
    me, numbers = dist.get_rank(), list[int]()

    def counted(values: Tensor, via: Transfer) -> Any:
        found = gather_payloads(values, via)
        numbers.append(len(found[0]))
        return found

    old = values_of(dtype, 4)
    new = moved(old)
    groups = CopyGroups.of(2, "")
    channel = Channels(CompressionConfig.parse({"zero": {"secondary": "exact"}}))["zero"]
    with (
        mock.patch.multiple(message_rounds, ROUND=600, HALF=300),
        mock.patch.object(chunking, "SEGMENT_ALIGN", 512),
        mock.patch.object(collectives, "gather_payloads", counted),
    ):
        held: Tensor | None = None
        POOL.clear()
        for values in (old, new):
            held = renew(channel, groups, values[me].clone(), held, (NUMEL, torch.bfloat16))
            assert torch.equal(bits_of(held), bits_of(values[list(groups.shares)]))
            assert len(POOL._free) >= 10, "the payloads of five rounds, sent and gathered"
    return numbers


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8], ids=str)
def test_long_shares_cross_in_rounds(on_ranks: RunRanks, dtype: torch.dtype) -> None:
    assert on_ranks(4, in_rounds, dtype) == [[5, 2]] * 4
